"""Models against eager: every contender is made, verified, timed in turns with the others, and weighed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.cells import Cell, run_cell
from bench.clients import served_clients
from bench.compilers import TUNED_AT, answering, compiled, packaged
from bench.dense_models import TrainingStep
from bench.peers import Ready, Skipped, with_fxopt
from bench.timing import behind_other_work
from bench.verify import Judge

EAGER, FXOPT, INDUCTOR = "eager", "fxopt", "fxopt, inductor"
STEP, COLD = "training step", "cold"  # behind the name of a model
CAPTURED_AT = 64


@dataclass(frozen=True)
class Made:
    """A model's contenders. seconds: of making each; torch.compile's are per batch size, see `compiled`.

    served: calls a second at the smallest batch size, by contender and the number of clients.
    """

    cells: tuple[Cell, ...]
    seconds: dict[str, list[float]]
    skipped: dict[str, str]
    peak_bytes: dict[str, int]
    served: dict[str, dict[int, float]]


def run_model(
    entry: Any,
    batches: Sequence[int],
    seconds: float,
    lowerings: Sequence[str],
    limit: float,
    cold: Collection[int] = (),
    thorough: bool = True,
) -> Made:
    """All contenders at each batch size; the optimized ones are made once, at another one.

    Args:
        lowerings: of fxopt, one or both of "fx" and "inductor".
        limit: seconds that torch.compile may take at each batch size (0: no compiler is asked).
        cold: batch sizes that are also timed behind other work, which empties the caches.
        thorough: whether the compilers are asked that make one package, for as many seconds, and max-autotune; and
            whether many clients call.
    """
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
    packages = packaged(model, example, limit) if limit and thorough else {}
    skipped |= {name: package.reason for name, package in packages.items() if isinstance(package, Skipped)}
    packages = {name: package for name, package in packages.items() if isinstance(package, Ready)}
    cells, peaks, served = [], dict[str, int](), dict[str, dict[int, float]]()
    for batch in batches:
        args = entry.make_inputs(batch, 0, model)
        try:
            expected = judge.expect(args)
        except Exception:  # a batch size that the model itself does not accept
            continue
        calls: dict[str, Callable[..., Any]] = {EAGER: model}
        tuned = thorough and batch == TUNED_AT
        peers = compiled(model, entry.fresh(args), limit, tuned=tuned) if limit else {}
        peers |= {name: answering(package, entry.fresh(args)) for name, package in packages.items()}
        for name, peer in peers.items():
            if isinstance(peer, Ready):
                calls[name] = peer.call
                spent.setdefault(name, []).append(peer.seconds)
            else:
                skipped[f"{name}, batch {batch}"] = peer.reason
        calls |= made
        cells.append(run_cell((entry.name, str(batch)), calls, [args], [expected], seconds, entry.fresh))
        if batch in cold:
            labels, fresh = (f"{entry.name}, {COLD}", str(batch)), behind_other_work(entry.fresh)
            cells.append(run_cell(labels, calls, [args], [expected], 2 * seconds, fresh))
        if thorough and batch == min(batches):
            served = served_clients({name: calls[name] for name in cells[-1].timings}, entry.fresh, args, seconds)
        if batch == max(batches):
            peaks = {name: peak_bytes(call, entry.fresh(args)) for name, call in calls.items()}
    return Made(tuple(cells), spent, skipped, peaks, served)


def is_call(cell: Cell) -> bool:
    """Whether a cell is an ordinary call, and belongs into a mean."""
    return not cell.labels[0].endswith((f", {STEP}", f", {COLD}"))


def run_step(entry: Any, batch: int, seconds: float, limit: float) -> Cell:
    """Forward and backward of one batch, gradients compared with eager's."""
    model = entry.make_model()
    eager = TrainingStep(model)
    args, expected = Judge(eager, entry.fresh).expect_smooth(lambda seed: entry.make_inputs(batch, seed, model))
    calls: dict[str, Callable[..., Any]] = {EAGER: eager}
    if limit:
        peers = compiled(model, entry.fresh(args), limit, functools.partial(TrainingStep, model))
        calls |= {name: peer.call for name, peer in peers.items() if isinstance(peer, Ready)}
    from fxopt.optimize import optimize

    with torch.enable_grad():
        example = entry.fresh(entry.make_inputs(CAPTURED_AT, 0, model))
        calls[FXOPT] = TrainingStep(model, optimize(model, example))
    return run_cell((f"{entry.name}, {STEP}", str(batch)), calls, [args], [expected], seconds, entry.fresh)


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
