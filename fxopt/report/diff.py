"""Two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fxopt.report.data import Measurement, Note, Report, SignatureReport
from fxopt.report.text.forms import inputs
from fxopt.report.text.notes import grid
from fxopt.report.text.tables import plain_table
from fxopt.report.units import error, seconds, times

_CHANGE = 0.1  # of a time; less is noise


@dataclass(frozen=True)
class Diff:
    """What a newer report of a model says otherwise than an older one; print it.

    Signatures are matched by the forms of their inputs.
    """

    old: Report
    new: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble("fxopt diff: ", (_named(self.old.model, self.new.model), "bold"))
        for name, old, new in self._settings():
            if old != new:
                yield Text(f"not measured alike: {name} was {old} and is {new}", "yellow")
        for before, after in self._pairs():
            yield Text()
            yield from _signature(before, after)

    def _settings(self) -> Iterator[tuple[str, object, object]]:
        for name in ("cpu", "device", "threads", "torch"):
            yield name, getattr(self.old.machine, name), getattr(self.new.machine, name)
        yield "training", self.old.training, self.new.training

    def _pairs(self) -> Iterator[tuple[SignatureReport | None, SignatureReport | None]]:
        left = list(self.old.signatures)
        for found in self.new.signatures:
            old = next((each for each in left if inputs(each.signature) == inputs(found.signature)), None)
            if old is not None:
                left.remove(old)
            yield old, found
        yield from ((old, None) for old in left)


def _signature(old: SignatureReport | None, new: SignatureReport | None) -> Iterator[RenderableType]:
    either = new or old
    assert either is not None
    yield Text(inputs(either.signature) or "no inputs", "dim")
    if old is None or new is None:
        yield Text("only in the older report" if new is None else "only in the newer report", "yellow")
        return
    yield _table(old, new)
    rows = [*_reasons(old.eager_reason, new.eager_reason), *_notes(old, new)]
    if rows:
        yield grid(rows)


def _table(old: SignatureReport, new: SignatureReport) -> RenderableType:
    table = plain_table("", "older", "newer", "")
    table.add_row("operators per call", f"{old.operators_after:,}", f"{new.operators_after:,}")
    before = {m.batch: m for m in old.measurements}
    for m in new.measurements:
        if m.batch in before:
            _rows(table, before[m.batch], m)
    return table


def _rows(table: Table, old: Measurement, new: Measurement) -> None:
    shown = f"batch {new.batch:,}: "
    for name, before, after in (("eager", old.eager, new.eager), ("fxopt", old.optimized, new.optimized)):
        table.add_row(shown + name, *_cells(before, after))
        shown = " " * len(shown)
    gains = [times(m.speedup) if m.speedup is not None else "busy" if m.distrust else "" for m in (old, new)]
    table.add_row(f"{shown}speed-up", *gains)
    table.add_row(f"{shown}largest error", error(old.max_error), error(new.max_error))


def _cells(before: float | None, after: float | None) -> tuple[str, str, Text]:
    if not before or not after:
        return ("" if before is None else seconds(before), "" if after is None else seconds(after), Text())
    change = after / before - 1
    style = "" if abs(change) < _CHANGE else "green" if change < 0 else "red"
    return seconds(before), seconds(after), Text(f"{change:+.0%}", style)


def _reasons(old: str, new: str) -> Iterator[tuple[str, Text]]:
    if old != new:
        yield "eager", Text(f"now stays eager: {new}" if new else f"no longer stays eager: {old}")


def _notes(old: SignatureReport, new: SignatureReport) -> Iterator[tuple[str, Text]]:
    """Rewrites and near misses that only one of the reports has."""
    for kind, gone, fresh in (("changes", "gone", "new"), ("misses", "no longer missed", "now missed")):
        before, after = _by_text(old, kind), _by_text(new, kind)
        for word, found, others in ((gone, before, after), (fresh, after, before)):
            for name, text in sorted(found.keys() - others.keys()):
                place = f" ({found[name, text].first})"
                yield word, Text.assemble((f"{name}: ", "bold"), text, (place, "cyan"))


def _by_text(found: SignatureReport, kind: str) -> dict[tuple[str, str], Note]:
    return {(each.name, note.text): note for each in found.passes for note in getattr(each, kind)}


def _named(old: str, new: str) -> str:
    return new if old == new else f"{old} and {new}"
