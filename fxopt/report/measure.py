"""Eager against optimized on one batch: verified first, then timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.report.data import Measurement
from fxopt.report.spending import spending
from fxopt.runtime import Executable, dispatcher_of
from fxopt.runtime.context import ambient
from fxopt.runtime.dispatch import Dispatcher
from fxopt.runtime.entry import Entry
from fxopt.tune.clock import no_gc
from fxopt.verify import verify

SECONDS = 1.5  # of timing for one batch size
FEWEST_ROUNDS = 5
SLICE = 0.01  # seconds a contender keeps the machine in one round


def measure(model: nn.Module, batch: int, args: tuple) -> tuple[Findings, Measurement]:
    """The findings of the capture that serves `args`, and what it gains there.

    Raises:
        Exception: what the eager model raises on `args`.
    """
    dispatcher = dispatcher_of(model)
    with torch.no_grad(), _undisturbed(dispatcher.original):
        model(*args)  # captures where no capture serves these arguments
        dispatcher.original(*args)  # may change what the capture depends on, and would at every turn
        entry, tensors = _serving(dispatcher, args)
        if entry is None and not dispatcher.refused:
            reason = "no capture holds for a second call: forward changes what the capture depends on"
            return Findings(eager_reason=reason), Measurement(batch, problem="captured anew at every call")
        if entry is None or entry.executable is None:
            findings = entry.findings if entry is not None else next(reversed(dispatcher.refused.values()))
            return findings, _timed(model, dispatcher.original, Measurement(batch, problem="stays eager"), args)
        verdict = verify(entry.executable, entry.executable.capture.graph, dispatcher.original, args, {}, Config())
        found = Measurement(batch, max_error=verdict.max_error)
        if not verdict.ok:
            return entry.findings, replace(found, problem=f"differs from eager: {verdict.message}")
        return entry.findings, _broken_down(_timed(model, dispatcher.original, found, args), entry.executable, tensors)


def _timed(model: nn.Module, original: nn.Module, found: Measurement, args: tuple) -> Measurement:
    eager, optimized = _turns([lambda: original(*args), lambda: model(*args)])
    low, speedup, high = statistics.quantiles([e / o for e, o in zip(eager, optimized, strict=True)], n=4)
    return replace(
        found,
        eager=statistics.median(eager),
        optimized=statistics.median(optimized),
        speedup=speedup,
        quartiles=(low, high),
    )


def _broken_down(found: Measurement, executable: Executable, tensors: Sequence[Tensor]) -> Measurement:
    assert found.eager is not None and found.optimized is not None
    before, after = executable.capture.graph, executable.graph
    return replace(found, spending=spending(before, found.eager, after, found.optimized, tensors))


def _serving(dispatcher: Dispatcher, args: tuple) -> tuple[Entry | None, Sequence[Tensor]]:
    now = ambient()
    for entry in dispatcher.entries:
        tensors = entry.match(args, {}, now)
        if tensors is not None:
            return entry, tensors
    return None, ()


def _turns(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Median seconds of each call in each round. Taking turns lets the noise of a shared machine hit all alike."""
    rounds: list[list[float]] = [[] for _ in calls]
    with no_gc():
        counts = [max(1, int(SLICE / min(_time(call), _time(call)))) for call in calls]
        deadline = time.perf_counter() + SECONDS
        while len(rounds[0]) < FEWEST_ROUNDS or time.perf_counter() < deadline:
            for call, count, medians in zip(calls, counts, rounds, strict=True):
                call()  # brings its own data back into the caches
                medians.append(statistics.median(_time(call) for _ in range(count)))
    return rounds


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Measuring leaves buffers (batch norm's statistics in train mode) and the random state as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)
