"""The numbers of a report: times of whole calls, where they go, and operators by role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxopt.report.data import Contender, Measurement, SignatureReport
from fxopt.report.units import error, percent, seconds, times

_KIND_WIDTH = 20  # "backward, and between operators" wraps
_BATCH_WIDTH = 28  # of one batch size in the table of where the time goes


def times_table(measurements: Sequence[Measurement]) -> RenderableType:
    names = [other.name for other in measurements[0].others]
    table = plain_table(
        "batch", "eager", "fxopt", "speed-up", "quartiles", *names, "error" if names else "largest error"
    )
    for m in measurements:
        speed = ("busy" if m.distrust else "") if m.speedup is None else times(m.speedup)
        style = "" if m.speedup is None else "green" if m.speedup >= 1.05 else "red" if m.speedup < 0.95 else ""
        whole = _seconds(m.eager), _seconds(m.optimized)
        spread = " to ".join(map(times, m.quartiles)) if m.quartiles and not m.distrust else ""
        others = (_contender(other) for other in m.others)
        table.add_row(f"{m.batch:,}", *whole, Text(speed, style), spread, *others, error(m.max_error))
    return table


def _contender(other: Contender) -> str:
    if other.seconds is None:
        return "failed"
    return seconds(other.seconds) + (f" ({times(other.speedup)})" if other.speedup is not None else "")


def remarks(found: SignatureReport, training: bool) -> Iterator[RenderableType]:
    """Why a batch size has no times, and what the times are."""
    for m in found.measurements:
        if m.problem and not found.eager_reason:
            yield Text(f"batch {m.batch:,}: {m.problem}", "yellow")
        if m.distrust:
            yield Text(f"batch {m.batch:,}: {m.distrust}", "yellow")
        for other in m.others:
            if other.problem:
                yield Text(f"batch {m.batch:,}: {other.name} failed: {other.problem}", "yellow")
    if any(m.eager is not None for m in found.measurements):
        calls = "training steps, forward and backward" if training else "whole calls without gradients"
        yield Text(f"{calls} in turns, the fastest of each turn, medians; results compared first", "dim")


def spending_tables(clocked: Sequence[Measurement], width: int) -> Iterator[RenderableType]:
    """Kinds of work down, batch sizes across, in as many tables as the width asks for."""
    fit = max(1, (width - 2 - _KIND_WIDTH) // _BATCH_WIDTH)
    for start in range(0, len(clocked), fit):
        if start:
            yield Text(" ")
        yield _spending_table(clocked[start : start + fit])
    yield Text("operators by their own time; the rows add up to the whole call", "dim")


def _spending_table(clocked: Sequence[Measurement]) -> RenderableType:
    table = plain_table("", *(part for m in clocked for part in (f"batch {m.batch:,}\neager", "\nshare", "\nfxopt")))
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


def roles_table(found: SignatureReport) -> RenderableType:
    table = plain_table("", "captured", "now")
    for tally in found.roles:
        table.add_row(tally.role, f"{tally.before:,}", f"{tally.after:,}")
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds(value)


def plain_table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table
