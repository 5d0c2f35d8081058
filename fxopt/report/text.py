"""How a report reads, from 80 columns up: a headline, the times, where they go, what changed, what did not and why."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fxopt.report.census import LOOKUP
from fxopt.report.data import Measurement, Note, Report, SignatureReport
from fxopt.report.units import count, error, percent, seconds, times

_KIND_WIDTH = 20
_BATCH_WIDTH = 28  # of one batch size in the table of where the time goes
_MOST_KINDS = 12  # of changes or misses of one pass


def plain(report: Report) -> str:
    """The report without colors, as wide as the terminal (80 where there is none)."""
    out = io.StringIO()
    Console(file=out, width=shutil.get_terminal_size((80, 24)).columns, color_system=None).print(report)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def render(report: Report, width: int) -> Iterator[RenderableType]:
    """The parts of the report from top to bottom, for a console `width` columns wide."""
    machine = report.machine
    yield Text.assemble("fxopt report: ", (report.model, "bold"))
    yield Text(f"{machine.cpu}, {count(machine.threads, 'thread')}, torch {machine.torch}", "dim")
    if not report.signatures:
        yield Text("\nNothing captured yet. Call the model once, or pass inputs to fxopt.report.")
    for number, found in enumerate(report.signatures, 1):
        yield Text()
        if len(report.signatures) > 1:
            yield Text(f"Signature {number} of {len(report.signatures)}", "bold")
        yield from _sections(found, width)


def headline(found: SignatureReport) -> str:
    """What was gained in one line: only what was counted or measured."""
    if found.eager_reason:
        return "Stays eager: nothing was changed"
    if found.leaves and not found.operators_before:
        return "Cut where it communicates: what lies between is captured"
    parts = []
    lookups = next((tally for tally in found.roles if tally.role == LOOKUP), None)
    if lookups is not None and lookups.after < lookups.before:
        parts.append(f"{count(lookups.before, 'lookup')} in {count(lookups.after, 'call')}")
    parts.append(f"{found.operators_before:,} -> {count(found.operators_after, 'operator')}")
    gains = [f"{times(m.speedup)} at batch {m.batch:,}" for m in found.measurements if m.speedup is not None]
    return "; ".join([*parts, ", ".join(gains)] if gains else parts)


def inputs(signature: str) -> str:
    """Inputs of one form once, with their number: 1000 columns have 1020 inputs. "f32[B, 13], 26 x i64[B]; eval".

    B is the size that most inputs share; others have letters, or * where they are many.
    """
    forms, semicolon, rest = in_letters(signature, signature).partition(";")
    counts = Counter(re.findall(r"[^,\[\s]+(?:\[[^\]]*\])?", forms))
    return ", ".join(f"{n:,} x {form}" if n > 1 else form for form, n in counts.items()) + semicolon + rest


def in_letters(text: str, signature: str) -> str:
    """`text` with B for the size that most inputs of the signature share, and letters for a few others.

    Where they are many, they are * in the signature.
    """
    counts = Counter(re.findall(r"\bs\d+\b", signature))
    ordered = [symbol for symbol, _ in counts.most_common()]
    letters = dict(zip(ordered, "BLMNKPQ" if len(ordered) <= 7 else "B", strict=False))
    return re.sub(r"\bs\d+\b", lambda found: letters.get(found[0], "*" if text is signature else found[0]), text)


def _sections(found: SignatureReport, width: int) -> Iterator[RenderableType]:
    yield Text(headline(found), "bold yellow" if found.eager_reason else "bold green")
    if found.signature:
        yield Text(inputs(found.signature), "dim")
    if found.measurements:
        yield from _section("Time per call", _times(found.measurements), *_remarks(found))
    clocked = [m for m in found.measurements if m.spending]
    if clocked:
        yield from _section("Where the time goes", *_spending(clocked, width))
    if found.roles:
        yield from _section("Operators per call", _roles(found))
    if any(item.changes for item in found.passes):
        yield from _section("What changed, and why that is safe", _changes(found))
    reasons = list(_reasons(found))
    if reasons:
        yield from _section("What did not change, and why", _grid(reasons))
    if found.passes or found.seconds:
        yield from _section("How it was done", _grid(list(_work(found))))


def _section(title: str, *body: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", "bold")
    for part in body:
        yield Padding(part, (0, 0, 0, 2), expand=False)


def _times(measurements: Sequence[Measurement]) -> RenderableType:
    table = _table("batch", "eager", "fxopt", "speed-up", "quartiles", "largest error")
    for m in measurements:
        speed = "" if m.speedup is None else times(m.speedup)
        style = "" if m.speedup is None else "green" if m.speedup >= 1.05 else "red" if m.speedup < 0.95 else ""
        whole = _seconds(m.eager), _seconds(m.optimized)
        spread = " to ".join(map(times, m.quartiles)) if m.quartiles else ""
        table.add_row(f"{m.batch:,}", *whole, Text(speed, style), spread, error(m.max_error))
    return table


def _remarks(found: SignatureReport) -> Iterator[RenderableType]:
    """Why a batch size has no times, and what the times are."""
    for m in found.measurements:
        if m.problem and not found.eager_reason:
            yield Text(f"batch {m.batch:,}: {m.problem}", "yellow")
    if any(m.speedup is not None for m in found.measurements):
        yield Text("medians of whole calls without gradients, in turns; results compared first", "dim")


def _spending(clocked: Sequence[Measurement], width: int) -> Iterator[RenderableType]:
    """Kinds of work down, batch sizes across, in as many tables as the width asks for."""
    fit = max(1, (width - 2 - _KIND_WIDTH) // _BATCH_WIDTH)
    for start in range(0, len(clocked), fit):
        if start:
            yield Text(" ")
        yield _spending_table(clocked[start : start + fit])
    yield Text("the whole call, split as its operators by themselves take their time", "dim")


def _spending_table(clocked: Sequence[Measurement]) -> RenderableType:
    table = _table("", *(part for m in clocked for part in (f"batch {m.batch:,}\neager", "\nshare", "\nfxopt")))
    rows = [{spent.kind: spent for spent in m.spending} for m in clocked]
    for kind in dict.fromkeys(kind for row in rows for kind in row):
        found = [row.get(kind) for row in rows]
        cells = [(seconds(s.before), percent(s.share), _seconds(s.after)) if s else ("", "", "") for s in found]
        table.add_row(kind, *(cell for group in cells for cell in group))
    totals = [(seconds(sum(s.before for s in m.spending)), "", _total_after(m)) for m in clocked]
    table.add_row("whole call", *(cell for group in totals for cell in group))
    return table


def _total_after(m: Measurement) -> str:
    after = [spent.after for spent in m.spending if spent.after is not None]
    return seconds(sum(after)) if after else ""


def _roles(found: SignatureReport) -> RenderableType:
    table = _table("", "captured", "now")
    for tally in found.roles:
        table.add_row(tally.role, f"{tally.before:,}", f"{tally.after:,}")
    return table


def _changes(found: SignatureReport) -> RenderableType:
    rows = []
    for item in found.passes:
        if item.name == "normalize":
            rows += [(item.name, _tally(item.changes))] if item.changes else []
            continue
        for note in item.changes[:_MOST_KINDS]:
            what = Text.assemble(in_letters(note.text, found.signature), (f" ({_where(note)})", "cyan"))
            why = in_letters(note.why, found.signature)
            rows.append((item.name, what.append(f"\nsafe: {why}", "dim") if why else what))
        rows += _more(item.name, item.changes)
    return _grid(rows)


def _tally(notes: Sequence[Note]) -> Text:
    """Spellings of one thing that became one: kinds and how many, without their places."""
    ordered = sorted(notes, key=lambda note: -note.count)
    parts = [(f"{note.count:,} x {note.text}", f": {note.why}" if note.why else "") for note in ordered]
    return Text("\n").join(Text.assemble(what, (why, "dim")) for what, why in parts)


def _more(name: str, notes: Sequence[Note]) -> list[tuple[str, Text]]:
    """What a pass found beyond the kinds that are shown."""
    rest = notes[_MOST_KINDS:]
    if not rest:
        return []
    places = sum(note.count for note in rest)
    return [(name, Text(f"{count(len(rest), 'more kind')} in {count(places, 'place')}; --json has all", "dim"))]


def _reasons(found: SignatureReport) -> Iterator[tuple[str, Text]]:
    """Near misses, rewrites taken back, opaque submodules, and what stopped the whole capture."""
    if found.eager_reason:
        yield "the model", Text(found.eager_reason)
    for leaf in found.leaves:
        yield "kept as it is", _sentence(leaf, leaf.text)
    for item in found.passes:
        for note in item.rolled_back:
            yield item.name, _sentence(note, f"taken back: {note.why or note.text}")
        for note in item.misses[:_MOST_KINDS]:
            yield item.name, _sentence(note, in_letters(note.text, found.signature))
        yield from _more(item.name, item.misses)
    if found.untold:
        yield "verification", Text(in_letters(found.untold, found.signature))


def _work(found: SignatureReport) -> Iterator[tuple[str, Text]]:
    """Passes that found nothing to do, and what each stage cost."""
    idle = [item.name for item in found.passes if not (item.changes or item.misses or item.rolled_back)]
    if idle:
        yield "found no match", Text(", ".join(idle))
    if found.seconds:
        stages = ", ".join(f"{stage} {seconds(spent)}" for stage, spent in found.seconds.items())
        yield "took", Text(f"{seconds(sum(found.seconds.values()))}: {stages}")
    if found.graphs:
        yield "replayed", Text(in_letters(found.graphs, found.signature))
    if found.max_error is not None:
        made_up = f", and at made-up sizes {in_letters(found.witness, found.signature)}" if found.witness else ""
        what = f"against eager when it was captured{made_up}; largest error {error(found.max_error)}"
        yield "verified", Text(what)


def _sentence(note: Note, text: str) -> Text:
    return Text.assemble((_where(note), "cyan"), ": ", text)


def _where(note: Note) -> str:
    """As in: tables.0 at model.py:64 and 879 like it."""
    return f"{note.first} and {note.count - 1:,} like it" if note.count > 1 else str(note.first)


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _grid(rows: Sequence[tuple[str, Text]]) -> RenderableType:
    """A name, once for all its rows, beside text that wraps."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    last = ""
    for name, text in rows:
        grid.add_row("" if name == last else name, text)
        last = name
    return grid


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table
