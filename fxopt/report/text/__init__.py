"""How a report reads, from 80 columns up: a headline, what to do, times, where they go, changes and reasons."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from fxopt.report.census import LOOKUP
from fxopt.report.data import Report, SignatureReport
from fxopt.report.text.forms import inputs
from fxopt.report.text.notes import advice, changes, grid, reasons, work
from fxopt.report.text.tables import remarks, roles_table, spending_tables, times_table
from fxopt.report.units import count, times

__all__ = ["Verbose", "headline", "inputs", "plain", "render"]


@dataclass(frozen=True)
class Verbose:
    """A report for a console, with what only a developer of fxopt wants to know."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render(self.report, options.max_width, verbose=True)


def plain(report: Report | Verbose) -> str:
    """The report without colors, as wide as the terminal (80 where there is none)."""
    out = io.StringIO()
    Console(file=out, width=shutil.get_terminal_size((80, 24)).columns, color_system=None).print(report)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def render(report: Report, width: int, verbose: bool = False) -> Iterator[RenderableType]:
    """The parts of the report from top to bottom, for a console `width` columns wide."""
    machine = report.machine
    yield Text.assemble("fxopt report: ", (report.model, "bold"), ", training" if report.training else "")
    device = "" if machine.device == "cpu" else f", {machine.device}"
    yield Text(f"{machine.cpu}, {count(machine.threads, 'thread')}{device}, torch {machine.torch}", "dim")
    if not report.signatures:
        yield Text("\nNothing captured yet. Call the model once, or pass inputs to fxopt.report.")
    for number, found in enumerate(report.signatures, 1):
        yield Text()
        if len(report.signatures) > 1:
            yield Text(f"Signature {number} of {len(report.signatures)}", "bold")
        yield from _sections(found, width, report.training, verbose)


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
    if any(m.distrust for m in found.measurements):
        gains.append("machine busy: measure again")
    return "; ".join([*parts, ", ".join(gains)] if gains else parts)


def _sections(found: SignatureReport, width: int, training: bool, verbose: bool) -> Iterator[RenderableType]:
    yield Text(headline(found), "bold yellow" if found.eager_reason else "bold green")
    if found.signature:
        yield Text(inputs(found.signature), "dim")
    if found.advice:
        yield from _section("What you could do", grid(list(advice(found))))
    if found.measurements:
        yield from _section("Time per call", times_table(found.measurements), *remarks(found, training))
    clocked = [m for m in found.measurements if m.spending]
    if clocked:
        yield from _section("Where the time goes", *spending_tables(clocked, width))
    if found.roles:
        yield from _section("Operators per call", roles_table(found))
    if any(item.changes for item in found.passes):
        yield from _section("What changed, and why that is safe", changes(found))
    why_not = list(reasons(found))
    if why_not:
        yield from _section("What did not change, and why", grid(why_not))
    if found.passes or found.seconds:
        yield from _section("How it was done", grid(list(work(found, verbose))))


def _section(title: str, *body: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", "bold")
    for part in body:
        yield Padding(part, (0, 0, 0, 2), expand=False)
