"""Third-party recommendation models, eager against fxopt: verified at odd batch sizes, then timed.

The models come from a Python file with `entries()`; an entry has `name`, `make_model()`,
`make_inputs(batch, seed, model)` and `fresh(args)` (the same arguments without what earlier calls memoized in them).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench import options
from bench.cells import Cell, run_cell
from bench.machine import Neighbours
from bench.peers import Ready, Skipped, with_fxopt
from bench.verify import Expected, Judge, WrongAnswer

ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo" / "zoo.py"
CAPTURED_AT = 64
VERIFIED_AT = (1, 3, 64, 200)
Optimize = Callable[[nn.Module, tuple], Ready | Skipped]
SLOWER = 0.95  # a ratio below this is called slower


@dataclass(frozen=True)
class Result:
    """One model. `wrong`: why it counts as a failure; `eager`: why it cannot be compared; both "" if all is well."""

    name: str
    cells: tuple[Cell, ...] = ()
    seconds: float = 0.0
    before: int = 0
    after: int = 0
    wrong: str = ""
    left_out: str = ""

    def ratio(self, batch: int) -> float | None:
        found = [cell.ratio("fxopt") for cell in self.cells if cell.labels[-1] == str(batch) and not cell.refused]
        return found[0] if found else None


def load(path: Path) -> Any:
    """The zoo module itself; a FileNotFoundError where it is absent."""
    if not path.exists():
        raise FileNotFoundError(f"no zoo at {path}: name one with --zoo")
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def run_model(entry: Any, batches: tuple[int, ...], seconds: float, optimize: Optimize = with_fxopt) -> Result:
    """What eager cannot run or repeat is left out; whatever goes wrong after that is fxopt's fault."""
    try:
        model = entry.make_model()
        example = entry.make_inputs(CAPTURED_AT, 0, model)
        judge = Judge(model, entry.fresh)
        judge.expect(example).check("eager, run twice,", _call(model, entry, example))
    except WrongAnswer as error:
        return Result(entry.name, left_out=str(error))
    except Exception as error:  # a missing library, a model that does not run with this torch
        return Result(entry.name, left_out=f"{type(error).__name__}: {_first_line(error)}")
    try:
        made = optimize(model, entry.fresh(example))
        if isinstance(made, Skipped):
            return Result(entry.name, left_out=made.reason)
        for batch in VERIFIED_AT:
            args = entry.make_inputs(batch, 1, model)
            if expected := _expect(judge, args):
                expected.check(f"batch {batch}", _call(made.call, entry, args))
        timed = (_time(entry, judge, made.call, batch, seconds) for batch in batches)
        cells = tuple(cell for cell in timed if cell)
    except Exception as error:
        return Result(entry.name, wrong=f"{type(error).__name__}: {_first_line(error)}")
    before, after = operators(model, entry, example), operators(made.call, entry, example)
    return Result(entry.name, cells, made.seconds, before, after, wrong=_refused(cells))


def _expect(judge: Judge, args: tuple) -> Expected | None:
    """None for a batch size that the model itself does not accept."""
    try:
        return judge.expect(args)
    except Exception:
        return None


def _time(entry: Any, judge: Judge, optimized: Callable[..., Any], batch: int, seconds: float) -> Cell | None:
    """What looks slower than eager is measured again, four times as long; the second figure counts."""
    args = entry.make_inputs(batch, 0, judge.model)
    expected = _expect(judge, args)
    if expected is None:
        return None
    calls: dict[str, Callable[..., Any]] = {"eager": judge.model, "fxopt": optimized}

    def cell(seconds: float) -> Cell:
        return run_cell((entry.name, str(batch)), calls, [args], [expected], seconds, entry.fresh)

    first = cell(seconds)
    slow = not first.refused and first.ratio("fxopt") < SLOWER
    return cell(4 * seconds) if slow else first


def _call(model: Callable[..., Any], entry: Any, args: tuple) -> Any:
    with torch.no_grad():
        return model(*entry.fresh(args))


def operators(model: Callable[..., Any], entry: Any, args: tuple) -> int:
    """Operators called from outside of other operators, as the profiler sees them."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        _call(model, entry, args)
    return sum(event.cpu_parent is None for event in profile.function_events or ())


def _refused(cells: tuple[Cell, ...]) -> str:
    return "; ".join(f"batch {cell.labels[-1]}: {reason}" for cell in cells for reason in cell.refused.values())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def geometric_mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def table(results: list[Result], batches: tuple[int, ...]) -> Table:
    shown = Table(title="eager / fxopt: above 1 is faster than eager", caption=f"red: slower than {SLOWER}")
    shown.add_column("model", no_wrap=True)
    for heading in ("operators", "optimize s", *(f"batch {batch}" for batch in batches)):
        shown.add_column(heading, justify="right")
    for result in results:
        ratios = [_shown(result.ratio(batch)) for batch in batches]
        operators = f"{result.before} > {result.after}" if result.before else ""
        seconds = f"{result.seconds:.2f}" if result.seconds else ""
        shown.add_row(result.name, operators, seconds, *ratios)
    means = [geometric_mean(list(_ratios(results, batch))) for batch in batches]
    shown.add_section()
    shown.add_row("geometric mean", "", "", *(f"[bold]{mean:.2f}[/]" for mean in means))
    return shown


def _ratios(results: list[Result], batch: int) -> Iterator[float]:
    yield from (ratio for result in results if (ratio := result.ratio(batch)) is not None)


def _shown(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"[red]{ratio:.2f}[/]" if ratio < SLOWER else f"{ratio:.2f}"


def notes(result: Result, batches: tuple[int, ...]) -> Iterator[str]:
    """What did not go well, a line each."""
    if result.wrong:
        yield f"[red]{result.name}: {result.wrong}[/]"
    if result.left_out:
        yield f"{result.name} left out: {result.left_out}"
    for batch in batches:
        ratio = result.ratio(batch)
        if ratio is not None and ratio < SLOWER:
            yield f"[red]{result.name}: slower than eager at batch {batch}: {ratio:.2f}[/]"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("zoo", __doc__, batches=(1, 256, 4096), seconds=1.0)
    parser.add_argument("--zoo", type=Path, default=ZOO, help="the file with the models")
    parser.add_argument("--only", default="", help="models whose name contains this")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    console: Console = options.begin(args)
    try:
        entries = [entry for entry in load(args.zoo).entries() if args.only in entry.name]
    except FileNotFoundError as error:
        console.print(str(error))
        return 2
    neighbours, results = Neighbours(), []
    with console.status("") as status:
        for i, entry in enumerate(entries):
            status.update(f"{i + 1} of {len(entries)}: {entry.name}")
            results.append(run_model(entry, args.batches, args.seconds))
            for line in notes(results[-1], args.batches):
                console.print(line)
    cells = [cell for result in results for cell in result.cells]
    status_of_cells = options.finish(args, console, "zoo", [table(results, args.batches)], cells, neighbours)
    return 1 if any(result.wrong for result in results) else status_of_cells
