"""The rows of bench/rows.py, one after the other, within a time: what `quick` and `all` share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import bags, cells, clients, dense, growth, machine, options, plot
from bench.cells import Cell
from bench.compilers import AOTI, COMPILE, ONNX, TUNED, TUNED_AT
from bench.contenders import FXOPT, Made, run_model, run_step
from bench.rows import Row, rows
from bench.zoo import ZOO, load

LEAST_LIMIT = 5.0  # seconds below which no compiler is asked
OWN_SECONDS = 8.0  # what a row takes besides its compiler and its timing: to make, verify and optimize the model


@dataclass(frozen=True)
class Preset:
    """minutes: in all; what there is no time for is left out. seconds: of timing in each cell; columns: of the growth;
    bags: batch sizes of the single bag, () without it; zoo: whether its models are rows as well."""

    name: str
    minutes: float
    seconds: float
    columns: tuple[int, ...]
    bags: tuple[int, ...] = ()
    zoo: bool = False

    @property
    def quick(self) -> bool:
        return not self.zoo


def parse(preset: Preset, argv: list[str]) -> argparse.Namespace:
    parser = options.parser(preset.name, __doc__, batches=(), seconds=preset.seconds)
    parser.set_defaults(batches=None)  # each row has its own
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--minutes", type=float, default=preset.minutes, help=f"default: {preset.minutes:g}")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds torch.compile may take (0: leave it out)")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="a file with more models, for `all`")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="write STEM.png, STEM.svg and STEM_growth.*")
    return parser.parse_args(argv)


def main(preset: Preset, argv: list[str]) -> int:
    args = parse(preset, argv)
    console, neighbours = options.begin(args), machine.Neighbours()
    suite = Suite(preset, args, console, time.perf_counter() + 60 * args.minutes)
    if not args.only:
        suite.growth()
        suite.bags()
    measured = suite.rows()
    served = {name: made.served for name, made in suite.made.items() if made.served}
    tables = [dense.table(preset.name, measured, suite.made), *suite.tables, *[clients.table(served)] * bool(served)]
    if args.plot or args.save:
        suite.draw(measured, args.plot or machine.result(preset.name).with_suffix(""))
    more = {"optimize_s": suite.optimize_s, "models": dense.described(suite.made)}
    status = options.finish(args, console, preset.name, tables, [*measured, *suite.others], neighbours, **more)
    return 1 if suite.failed else status


class Suite:
    """What a preset asks for, and what came of it.

    made: by model. others, tables: the cells and tables of what is no row. optimize_s: seconds by number of columns.
    """

    def __init__(self, preset: Preset, args: argparse.Namespace, console: Console, deadline: float) -> None:
        self.preset, self.args, self.console, self.deadline = preset, args, console, deadline
        self.made, self.optimize_s = dict[str, Made](), dict[int, float]()
        self.others, self.tables = list[Cell](), list[Table]()
        self.failed = False
        self._thorough = not preset.quick  # a package takes half a minute

    def growth(self) -> None:
        for columns in self.preset.columns:
            with self.console.status(f"{columns} columns"):
                cell, self.optimize_s[columns] = growth.run(columns, self.args.seconds)
            self.others.append(cell)
        self.tables.append(growth.table(self.others, list(self.optimize_s.values())))

    def bags(self) -> None:
        if self.preset.bags:
            found = bags.run(self.console, self.preset.bags, "sum", self.args.seconds)
            self.tables.append(cells.table(bags.title("sum"), ("batch",), found))
            self.others += found

    def rows(self) -> list[Cell]:
        """Every row that there is time for. What is left out, or fails, is a line on the console."""
        chosen = [row for row in self._chosen() if self.args.only in row.entry.name]
        found: list[Cell] = []
        for number, row in enumerate(chosen):
            left = chosen[number:]
            if time.perf_counter() > self.deadline:
                self.console.print(f"no time was left for {', '.join(row.entry.name for row in left)}")
                break
            with self.console.status(f"{number + 1} of {len(chosen)}: {row.entry.name}"):
                found += self._row(row, self._limit(row, left))
        return found

    def _limit(self, row: Row, left: Sequence[Row]) -> float:
        """Seconds for torch.compile at each batch size, when `left` are to come; 0: it is left out.

        What the rows do not need themselves is shared by those that torch.compile is asked for.
        """
        if not row.compiles:
            return 0.0
        spare = self.deadline - time.perf_counter() - OWN_SECONDS * len(left)
        batches = self._batches(row)
        compiles = len(batches) + (row.step is not None) + self._thorough * (2 + (TUNED_AT in batches))
        limit = min(self.args.limit, spare / sum(each.compiles for each in left) / compiles)
        return limit if limit >= LEAST_LIMIT else 0.0

    def _batches(self, row: Row) -> tuple[int, ...]:
        return self.args.batches or row.batches(self.preset.quick)

    def _row(self, row: Row, limit: float) -> Sequence[Cell]:
        name = row.entry.name
        try:
            batches, seconds = self._batches(row), self.args.seconds
            made = run_model(row.entry, batches, seconds, ("fx",), limit, row.cold, self._thorough)
            step = [run_step(row.entry, row.step, self.args.seconds, limit)] if row.step else []
        except ImportError as error:
            self.console.print(escape(f"{name} left out: {error}"))
            return ()
        except Exception as error:
            self.failed = True
            self.console.print(f"[red]{escape(f'{name}: {type(error).__name__}: {str(error)[:300]}')}[/]")
            return ()
        self.made[name] = made
        if self.args.limit and not limit:
            made.skipped[COMPILE] = "there is no time for it" if row.compiles else "it takes minutes"
        for contender, reason in made.skipped.items():
            self.console.print(escape(f"{name}: no {contender}: {reason}"))
        return [*made.cells, *step]

    def draw(self, measured: Sequence[Cell], stem: Path) -> None:
        """Writes stem.png, stem.svg and stem_growth.*, where matplotlib is installed."""
        try:
            paths = plot.draw(measured, (COMPILE, TUNED, AOTI, ONNX, FXOPT), stem) if measured else []
            if self.optimize_s:
                grown, seconds = self.others[: len(self.optimize_s)], list(self.optimize_s.values())
                paths += plot.draw_growth(grown, seconds, stem.with_name(f"{stem.name}_growth"))
        except ImportError as error:
            self.console.print(escape(f"no plots: {error} (pip install '.[bench]')"))
        else:
            self.console.print(f"wrote {', '.join(map(str, paths))}")

    def _chosen(self) -> Iterator[Row]:
        yield from (row for row in rows() if row.batches(self.preset.quick))
        if self.preset.zoo:
            try:
                yield from (Row(entry, compiles=entry.name in dense.SAMPLE) for entry in load(self.args.zoo).entries())
            except FileNotFoundError as error:
                self.console.print(escape(str(error)))
