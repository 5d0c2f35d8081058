"""The dense side of recommendation models: eager, torch.compile and fxopt, each verified and then timed in turns.

The models are plain PyTorch (bench/dense_models.py), or a sample of a zoo, see `python -m bench zoo`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import options
from bench.cells import Cell, shown_ratio
from bench.compilers import AOTI, COMPILE, ONNX, TUNED
from bench.contenders import EAGER, FXOPT, INDUCTOR, Made, is_call, run_model, run_step
from bench.dense_models import entries
from bench.machine import Neighbours
from bench.plot import draw
from bench.rows import BATCHES
from bench.zoo import geometric_mean, load

NAMES = (COMPILE, TUNED, AOTI, ONNX, FXOPT, INDUCTOR)  # in the order of tables and plots

# Of each kind that torch.compile is good and bad at, what it compiles within minutes.
SAMPLE = """deepctr/DeepFM deepctr/xDeepFM deepctr/DCN_matrix deepctr/AutoInt deepctr/DIFM deepctr/AFM deepctr/MMOE
    deepctr/DIN deepctr/WDL_bn_dice torchfm/FFM torchfm/OPNN torchrec/DLRM""".split()  # noqa: SIM905


def table(title: str, cells: Sequence[Cell], made: dict[str, Made]) -> Table:
    """A row a model and batch; ratios to eager, and the seconds that each contender took to make."""
    names = [name for name in NAMES if any(name in cell.timings for cell in cells)]
    caption = "ratios: eager / this, above 1 is faster than eager; ? where the rounds differ; seconds: to make it"
    shown = Table(title=title, caption=caption)
    for heading in ("model", "batch"):
        shown.add_column(heading, no_wrap=True)
    headings = ("eager ms", *names, *(f"{name} p99 ms" for name in (EAGER, FXOPT)), f"{FXOPT} error")
    for heading in (*headings, *(f"{name} s" for name in names)):
        shown.add_column(heading, justify="right")
    for cell in cells:
        p99s = [_milliseconds(cell, name, "p99") for name in (EAGER, FXOPT)]
        error = f"{cell.errors[FXOPT]:.0e}" if FXOPT in cell.errors else "[red]wrong[/]" * (FXOPT in cell.refused)
        spent = made[cell.labels[0]].seconds if cell.labels[0] in made else {}
        seconds = [f"{sum(spent[name]) / len(spent[name]):.1f}" if name in spent else "" for name in names]
        ratios = [shown_ratio(cell, name) for name in names]
        shown.add_row(*cell.labels, _milliseconds(cell, EAGER, "median"), *ratios, *p99s, error, *seconds)
    shown.add_section()
    for some in dict.fromkeys(((FXOPT,), tuple(names))):
        title = "geometric mean" if len(some) == 1 else "geometric mean where all ran"
        for batch, means in geometric_means(cells, some).items():
            shown.add_row(title, batch, "", *(f"[bold]{means[name]:.2f}[/]" if name in means else "" for name in names))
    return shown


def _milliseconds(cell: Cell, name: str, which: str) -> str:
    return f"{getattr(cell.timings[name], which) * 1e3:.3f}" if name in cell.timings else ""


def geometric_means(cells: Sequence[Cell], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By batch size, then contender: of eager / this, over the cells that all of the contenders ran."""
    means = {}
    for batch in dict.fromkeys(cell.labels[1] for cell in cells):
        whole = [c for c in cells if c.labels[1] == batch and set(names) <= c.timings.keys() and is_call(c)]
        if whole:
            means[batch] = {name: geometric_mean([cell.ratio(name) for cell in whole]) for name in names}
    return means


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("dense", __doc__, batches=BATCHES, seconds=1.0)
    parser.set_defaults(batches=None)  # some of our own models are measured at others
    parser.add_argument("--zoo", type=Path, help="a file with models, instead of our own")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--limit", type=float, default=300, help="seconds torch.compile may take (0: leave it out)")
    parser.add_argument("--inductor", action="store_true", help='fxopt with Config(lower="inductor") too')
    parser.add_argument("--plot", type=Path, help="write the plot there, as .png and .svg")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Any]:
    if args.zoo is None:
        return [entry for entry in entries() if args.only in entry.name]
    zoo = load(args.zoo)
    return [zoo.get(name) for name in SAMPLE if args.only in name]


def main(argv: list[str]) -> int:
    args = parse(argv)
    console = options.begin(args)
    lowerings = ("fx", "inductor") if args.inductor else ("fx",)
    neighbours, made, cells = Neighbours(), dict[str, Made](), list[Cell]()
    with console.status("") as status:
        for entry in chosen(args):
            status.update(entry.name)
            batches = args.batches or getattr(entry, "batches", BATCHES)
            result = made[entry.name] = run_model(entry, batches, args.seconds, lowerings, args.limit)
            cells += result.cells
            if entry.name == "DLRM":
                cells.append(run_step(entry, 1024, args.seconds, args.limit))
            for name, reason in result.skipped.items():
                console.print(f"{entry.name}: {name}: {reason}")
    shown = table("dense models", cells, made)
    exit_status = options.finish(args, console, "dense", [shown], cells, neighbours, models=described(made))
    for name, result in made.items():
        peaks = ", ".join(f"{who} {size / 1e6:.1f} MB" for who, size in result.peak_bytes.items())
        console.print(f"{name}: peak memory of a call at the largest batch: {peaks}")
    if args.plot:
        for path in draw(cells, NAMES, args.plot):
            console.print(f"wrote {path}")
    return exit_status


def described(made: dict[str, Made]) -> dict[str, Any]:
    """What a model's JSON has beside its cells."""
    return {
        name: {"seconds": it.seconds, "skipped": it.skipped, "peak_bytes": it.peak_bytes, "calls_a_second": it.served}
        for name, it in made.items()
    }
