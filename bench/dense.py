"""The dense side of recommendation models: eager, torch.compile and fxopt, each verified and then timed in turns.

torch.compile gets its default settings and a compile of its own for each batch size, from an empty cache. The models
are plain PyTorch (bench/dense_models.py), or a sample of a zoo, see `python -m bench zoo`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench import options
from bench.cells import Cell, run_cell
from bench.dense_models import TrainingStep, entries
from bench.machine import Neighbours
from bench.peers import Ready, Skipped, scratch, with_fxopt
from bench.verify import Judge
from bench.zoo import geometric_mean, load

EAGER, COMPILE, FXOPT, INDUCTOR, STEP = "eager", "torch.compile", "fxopt", "fxopt, inductor", "training step"
CAPTURED_AT = 64
BATCHES = (1, 256, 4096)
# Of each kind that torch.compile is good and bad at, what it compiles within minutes.
SAMPLE = """deepctr/DeepFM deepctr/xDeepFM deepctr/DCN_matrix deepctr/AutoInt deepctr/DIFM deepctr/AFM deepctr/MMOE
    deepctr/DIN deepctr/WDL_bn_dice torchfm/FFM torchfm/OPNN torchrec/DLRM""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Made:
    """A model's contenders. seconds: of making each; torch.compile's are per batch size, see `compiled`."""

    cells: tuple[Cell, ...]
    seconds: dict[str, list[float]]
    skipped: dict[str, str]
    peak_bytes: dict[str, int]


def run_model(entry: Any, batches: Sequence[int], seconds: float, lowerings: Sequence[str], limit: float) -> Made:
    """All contenders at each batch size; the optimized ones are made once, at another one."""
    model = entry.make_model()
    judge = Judge(model, entry.fresh)
    example = entry.fresh(entry.make_inputs(CAPTURED_AT, 0, model))
    made, spent, skipped = dict[str, Callable[..., Any]](), dict[str, list[float]](), dict[str, str]()
    for name, lower in zip((FXOPT, INDUCTOR), lowerings, strict=False):
        ready = with_fxopt(model, example, lower)
        if isinstance(ready, Ready):
            made[name], spent[name] = ready.call, [ready.seconds]
        else:
            skipped[name] = ready.reason
    cells, peaks = [], dict[str, int]()
    for batch in batches:
        args = entry.make_inputs(batch, 0, model)
        try:
            expected = judge.expect(args)
        except Exception:  # a batch size that the model itself does not accept
            continue
        calls: dict[str, Callable[..., Any]] = {EAGER: model}
        peer = compiled(model, entry.fresh(args), limit) if limit else Skipped("left out")
        if isinstance(peer, Ready):
            calls[COMPILE] = peer.call
            spent.setdefault(COMPILE, []).append(peer.seconds)
        else:
            skipped[f"{COMPILE}, batch {batch}"] = peer.reason
        calls |= made
        cells.append(run_cell((entry.name, str(batch)), calls, [args], [expected], seconds, entry.fresh))
        if batch == max(batches):
            peaks = {name: peak_bytes(call, entry.fresh(args)) for name, call in calls.items()}
    return Made(tuple(cells), spent, skipped, peaks)


def run_step(entry: Any, batch: int, seconds: float, limit: float) -> Cell:
    """Forward and backward of one batch, gradients compared with eager's."""
    model = entry.make_model()
    args = entry.make_inputs(batch, 0, model)
    eager = TrainingStep(model)
    calls: dict[str, Callable[..., Any]] = {EAGER: eager}
    if limit:
        torch._dynamo.reset()
        calls[COMPILE] = TrainingStep(model, torch.compile(model))
    from fxopt.optimize import optimize

    with torch.enable_grad():
        calls[FXOPT] = TrainingStep(model, optimize(model, entry.make_inputs(CAPTURED_AT, 0, model)))
    return run_cell((f"{entry.name}, {STEP}", str(batch)), calls, [args], [Judge(eager).expect(args)], seconds)


def compiled(model: nn.Module, args: tuple, limit: float) -> Ready | Skipped:
    """torch.compile at one batch size, as a first user of the machine finds it."""
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch()
    call = torch.compile(model)
    start = time.perf_counter()
    try:
        with torch.no_grad(), _within(limit):
            call(*args)
    except Exception as error:
        return Skipped((str(error).splitlines() or [type(error).__name__])[0][:200])
    return Ready(call, time.perf_counter() - start)


class OutOfTime(Exception):
    """No TimeoutError, which Inductor takes for its worker's."""


@contextmanager
def _within(limit: float) -> Iterator[None]:
    """OutOfTime after `limit` seconds, where the system can send one."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"not done after {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes(call: Callable[..., Any], args: tuple) -> int:
    """The most that torch's allocator holds during a call, beyond what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call(*args)
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def table(cells: Sequence[Cell], made: dict[str, Made]) -> Table:
    """A row a model and batch; ratios to eager, and the seconds that each contender took to make."""
    names = [name for name in (COMPILE, FXOPT, INDUCTOR) if any(name in cell.timings for cell in cells)]
    shown = Table(title="eager / this: above 1 is faster than eager", caption="seconds: to compile or optimize")
    for heading in ("model", "batch"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("eager ms", *names, *(f"{name} s" for name in names)):
        shown.add_column(heading, justify="right")
    for cell in cells:
        ratios = [f"{cell.ratio(name):.2f}" if name in cell.timings else "" for name in names]
        spent = made[cell.labels[0]].seconds if cell.labels[0] in made else {}
        seconds = [f"{sum(spent[name]) / len(spent[name]):.1f}" if name in spent else "" for name in names]
        shown.add_row(*cell.labels, f"{cell.timings[EAGER].median * 1e3:.3f}", *ratios, *seconds)
    shown.add_section()
    for batch, means in geometric_means(cells, names).items():
        shown.add_row("geometric mean", batch, "", *(f"[bold]{means[name]:.2f}[/]" for name in names))
    return shown


def geometric_means(cells: Sequence[Cell], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By batch size, then contender: of eager / this, over the cells that all of the contenders ran."""
    means = {}
    for batch in dict.fromkeys(cell.labels[1] for cell in cells):
        whole = [
            c for c in cells if c.labels[1] == batch and set(names) <= c.timings.keys() and STEP not in c.labels[0]
        ]
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
    console.print(table(cells, made))
    for name, result in made.items():
        peaks = ", ".join(f"{who} {size / 1e6:.1f} MB" for who, size in result.peak_bytes.items())
        console.print(f"{name}: peak memory of a call at the largest batch: {peaks}")
    if args.plot:
        from bench.plot import draw  # matplotlib is an extra of its own

        for path in draw(cells, (COMPILE, FXOPT, INDUCTOR), args.plot):
            console.print(f"wrote {path}")
    more = {name: {"seconds": r.seconds, "skipped": r.skipped, "peak_bytes": r.peak_bytes} for name, r in made.items()}
    return options.finish(args, console, "dense", cells, neighbours, models=more)
