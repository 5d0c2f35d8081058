"""How the cost of optimize() and of a call grows with the number of embedding columns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import options
from bench.cells import Cell, run_cell, shown_ratio
from bench.contenders import CAPTURED_AT, EAGER, FXOPT
from bench.machine import Neighbours
from bench.models import ManyColumns, Mix, make_inputs
from bench.peers import Skipped, with_fxopt
from bench.plot import draw_growth
from bench.verify import Judge

SIZES = (10, 100, 1000, 5000)


def mix(columns: int) -> Mix:
    """Nine bucketize columns to one hash, and a small MLP: a call is little but the columns."""
    return Mix(columns - columns // 10, columns // 10, 0, 0, 0, top=(64,))


def run(columns: int, seconds: float) -> tuple[Cell, float]:
    """A call at batch 1, and the seconds of optimize().

    Raises:
        RuntimeError: fxopt cannot be imported.
    """
    model = ManyColumns(mix(columns))
    made = with_fxopt(model, make_inputs(model.mix, CAPTURED_AT))
    if isinstance(made, Skipped):
        raise RuntimeError(made.reason)
    inputs = make_inputs(model.mix, 1)
    calls: dict[str, Callable[..., Any]] = {EAGER: model, FXOPT: made.call}
    cell = run_cell((str(columns), "1"), calls, [inputs], [Judge(model).expect(inputs)], seconds)
    return cell, made.seconds


def table(cells: Sequence[Cell], seconds: Sequence[float]) -> Table:
    shown = Table(title="growth with the number of columns, batch 1", caption="a column: its share of the call")
    for heading in ("columns", "optimize s", "eager ms", "fxopt ms", "ratio", "eager us a column", "fxopt us a column"):
        shown.add_column(heading, justify="right")
    for cell, spent in zip(cells, seconds, strict=True):
        columns = int(cell.labels[0])
        eager, fast = (cell.timings[name].median for name in (EAGER, FXOPT))
        each = [f"{1e6 * time / columns:.2f}" for time in (eager, fast)]
        times = [f"{1e3 * time:.3f}" for time in (eager, fast)]
        shown.add_row(str(columns), f"{spent:.2f}", *times, shown_ratio(cell, FXOPT), *each)
    return shown


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("growth", __doc__, batches=(1,), seconds=2.0)
    parser.add_argument("--columns", type=options.numbers, default=SIZES, help="default: 10,100,1000,5000")
    parser.add_argument("--plot", type=Path, help="write the plot there, as .png and .svg")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    console, neighbours = options.begin(args), Neighbours()
    found = []
    for columns in args.columns:
        with console.status(f"{columns} columns"):
            found.append(run(columns, args.seconds))
    cells, seconds = [cell for cell, _ in found], [spent for _, spent in found]
    if args.plot:
        for path in draw_growth(cells, seconds, args.plot):
            console.print(f"wrote {path}")
    return options.finish(args, console, "growth", [table(cells, seconds)], cells, neighbours, optimize_s=seconds)
