"""Models against eager: every contender is made, verified, timed in turns with the others, and weighed.

torch.compile gets its default settings and a compile of its own for each batch size, from an empty cache. AOTInductor
gets one package with a dynamic batch size.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from bench.cells import Cell, run_cell
from bench.dense_models import TrainingStep
from bench.peers import Ready, Skipped, scratch, with_fxopt
from bench.timing import behind_other_work
from bench.verify import Judge

EAGER, COMPILE, AOTI, FXOPT, INDUCTOR = "eager", "torch.compile", "AOTInductor", "fxopt", "fxopt, inductor"
STEP, COLD = "training step", "cold"  # behind the name of a model
CAPTURED_AT = 64


@dataclass(frozen=True)
class Made:
    """A model's contenders. seconds: of making each; torch.compile's are per batch size, see `compiled`."""

    cells: tuple[Cell, ...]
    seconds: dict[str, list[float]]
    skipped: dict[str, str]
    peak_bytes: dict[str, int]


def run_model(
    entry: Any,
    batches: Sequence[int],
    seconds: float,
    lowerings: Sequence[str],
    limit: float,
    cold: Collection[int] = (),
    aoti: bool = True,
) -> Made:
    """All contenders at each batch size; the optimized ones are made once, at another one.

    Args:
        lowerings: of fxopt, one or both of "fx" and "inductor".
        limit: seconds that torch.compile may take at each batch size (0: it is left out).
        cold: batch sizes that are also timed behind other work, which empties the caches.
        aoti: whether AOTInductor is asked for too, once, for as many seconds.
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
    package = packaged(model, example, limit) if limit and aoti else None
    if isinstance(package, Skipped):
        skipped[AOTI] = package.reason
    cells, peaks = [], dict[str, int]()
    for batch in batches:
        args = entry.make_inputs(batch, 0, model)
        try:
            expected = judge.expect(args)
        except Exception:  # a batch size that the model itself does not accept
            continue
        calls: dict[str, Callable[..., Any]] = {EAGER: model}
        peers = {COMPILE: compiled(model, entry.fresh(args), limit)} if limit else {}
        if isinstance(package, Ready):
            peers[AOTI] = _answering(package, entry.fresh(args))
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
        if batch == max(batches):
            peaks = {name: peak_bytes(call, entry.fresh(args)) for name, call in calls.items()}
    return Made(tuple(cells), spent, skipped, peaks)


def is_call(cell: Cell) -> bool:
    """Whether a cell is an ordinary call, and belongs into a mean."""
    return not cell.labels[0].endswith((f", {STEP}", f", {COLD}"))


def run_step(entry: Any, batch: int, seconds: float, limit: float) -> Cell:
    """Forward and backward of one batch, gradients compared with eager's."""
    model = entry.make_model()
    args = entry.make_inputs(batch, 0, model)
    eager = TrainingStep(model)
    calls: dict[str, Callable[..., Any]] = {EAGER: eager}
    if limit:
        peer = compiled(model, entry.fresh(args), limit, functools.partial(TrainingStep, model))
        calls |= {COMPILE: peer.call} if isinstance(peer, Ready) else {}
    from fxopt.optimize import optimize

    with torch.enable_grad():
        example = entry.fresh(entry.make_inputs(CAPTURED_AT, 0, model))
        calls[FXOPT] = TrainingStep(model, optimize(model, example))
    labels, expected = (f"{entry.name}, {STEP}", str(batch)), Judge(eager, entry.fresh).expect(args)
    return run_cell(labels, calls, [args], [expected], seconds, entry.fresh)


def compiled(
    model: nn.Module, args: tuple, limit: float, around: Callable[[Any], Callable[..., Any]] = lambda call: call
) -> Ready | Skipped:
    """torch.compile at one batch size, as a first user of the machine finds it. around: what calls it."""
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch()
    call = around(torch.compile(model))
    start = time.perf_counter()
    try:
        with torch.no_grad(), _within(limit):
            call(*args)
    except Exception as error:
        return Skipped(_first_line(error))
    return Ready(call, time.perf_counter() - start)


def packaged(model: nn.Module, args: tuple, limit: float) -> Ready | Skipped:
    """AOTInductor's package of a model, whose export may keep the first dim of each input dynamic."""
    first = torch.utils._pytree.tree_map(
        lambda x: {0: Dim.AUTO} if isinstance(x, torch.Tensor) and x.ndim else None, args
    )
    path, start = os.path.join(scratch(), "model.pt2"), time.perf_counter()
    try:
        with torch.no_grad(), _within(limit):
            program = torch.export.export(model, args, dynamic_shapes=first, strict=False)
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            package = torch._inductor.aoti_load_package(path)
    except Exception as error:
        return Skipped(_first_line(error))
    return Ready(package, time.perf_counter() - start)


def _answering(package: Ready, args: tuple) -> Ready | Skipped:
    """The package, unless its export has fixed another batch size."""
    try:
        package.call(*args)
    except Exception as error:
        return Skipped(_first_line(error))
    return package


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


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
