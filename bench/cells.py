"""One cell of a benchmark: contenders on one input, verified, then timed in turns; and the table of many cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from bench.timing import Timing, measure, quartiles, ratio
from bench.verify import Expected, WrongAnswer

NOISY = 1.25  # quartiles of a ratio that are further apart say nothing


@dataclass(frozen=True)
class Cell:
    """How each contender that was right performed, and what was wrong with the others.

    labels: what the cell is ("whole", "64"). base: the contender the ratios refer to.
    """

    labels: tuple[str, ...]
    base: str
    timings: dict[str, Timing]
    errors: dict[str, float]
    refused: dict[str, str]

    def ratio(self, name: str) -> float:
        """base / name: above 1, `name` is the faster one."""
        return ratio(self.timings[self.base], self.timings[name])

    def noisy(self, name: str) -> bool:
        """Whether the rounds were too far apart to trust the ratio."""
        first, third = quartiles(self.timings[self.base], self.timings[name])
        return third > NOISY * first

    def as_dict(self) -> dict[str, Any]:
        contenders = {
            name: {
                "median_s": timing.median,
                "min_s": timing.minimum,
                "p99_s": timing.p99,
                f"{self.base} / this": self.ratio(name),
                "quartiles": quartiles(self.timings[self.base], timing),
                "max_error": self.errors[name],
            }
            for name, timing in self.timings.items()
        }
        return {"labels": self.labels, "contenders": contenders, "refused": self.refused}


def run_cell(
    labels: tuple[str, ...],
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple],
    expected: Sequence[Expected],
    seconds: float,
    fresh: Callable[[tuple], tuple] = lambda args: args,
) -> Cell:
    """Times what is right on every one of `inputs`; the first contender is the base and has to be right."""
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, call in contenders.items():
        try:
            with torch.no_grad():
                found = [e.check(name, call(*fresh(args))) for args, e in zip(inputs, expected, strict=True)]
            errors[name] = max(found)
        except WrongAnswer as error:
            refused[name] = str(error)
    base = next(iter(contenders))
    if base in refused:
        raise WrongAnswer(f"the base of the comparison is wrong. {refused[base]}")
    timings = measure({name: contenders[name] for name in errors}, inputs, seconds, fresh)
    return Cell(labels, base, timings, errors, refused)


def shown_ratio(cell: Cell, name: str) -> str:
    """base / name, with a question mark where it is noisy; "" where the contender did not run."""
    if name not in cell.timings:
        return ""
    return f"{cell.ratio(name):.2f}{'?' * cell.noisy(name)}"


def markdown(shown: Table) -> str:
    """A table of rich as one of Markdown."""
    rows = zip(*([Text.from_markup(str(cell)).plain for cell in column.cells] for column in shown.columns), strict=True)
    lines = [[str(column.header) for column in shown.columns], ["---"] * len(shown.columns), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {shown.title}\n\n{table}\n\n{shown.caption or ''}\n"


def table(title: str, headings: Sequence[str], cells: Sequence[Cell]) -> Table:
    base = cells[0].base
    shown = Table(
        title=title, caption=f"ratio: {base} / this, above 1 is faster than {base}; ? where the rounds differ"
    )
    for heading in headings:
        shown.add_column(heading)
    shown.add_column("contender", no_wrap=True)
    for heading in ("median ms", "p99 ms", "fastest ms", "ratio", "max error"):
        shown.add_column(heading, justify="right")
    for cell in cells:
        labels: Sequence[str] = cell.labels
        for name in (*cell.timings, *cell.refused):
            shown.add_row(*labels, name, *_texts(cell, name))
            labels = [""] * len(labels)
        shown.add_section()
    return shown


def _texts(cell: Cell, name: str) -> list[str]:
    if name in cell.refused:
        return ["[red]wrong[/]", "", "", "", ""]
    timing = cell.timings[name]
    return [
        f"{timing.median * 1e3:.4f}",
        f"{timing.p99 * 1e3:.4f}",
        f"{timing.minimum * 1e3:.4f}",
        f"[bold]{shown_ratio(cell, name)}[/]",
        f"{cell.errors[name]:.1e}",
    ]
