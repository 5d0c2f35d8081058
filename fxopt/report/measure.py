"""Eager against optimized on one batch: verified first, then timed in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.report.data import Measurement
from fxopt.report.spending import spending
from fxopt.runtime import dispatcher_of
from fxopt.runtime.context import ambient
from fxopt.runtime.dispatch import Dispatcher, Entry
from fxopt.verify import verify

SECONDS = 1.5  # of timing for a batch; on a noisy machine a second run then agrees within 5%
FEWEST_ROUNDS = 5
SLICE = 0.01  # seconds a contender keeps the machine in one round


def measure(model: nn.Module, batch: int, args: tuple) -> tuple[Findings, Measurement]:
    """The findings of the capture that serves `args`, and what it gains there.

    Raises:
        Exception: what the eager model raises on `args`.
    """
    dispatcher = dispatcher_of(model)
    with torch.no_grad(), _buffers_kept(dispatcher.original):
        model(*args)  # captures where no capture serves these arguments
        entry, tensors = _serving(dispatcher, args)
        if entry is None or entry.executable is None:
            findings = entry.findings if entry is not None else dispatcher.findings[-1]
            eager = statistics.median(_turns([lambda: dispatcher.original(*args)])[0])
            return findings, Measurement(batch, eager, problem="stays eager")
        return entry.findings, _compared(model, dispatcher.original, entry, tensors, batch, args)


def _compared(
    model: nn.Module, original: nn.Module, entry: Entry, tensors: Sequence[Tensor], batch: int, args: tuple
) -> Measurement:
    executable = entry.executable
    assert executable is not None
    verdict = verify(executable, executable.capture.graph, original, args, {}, Config())
    if not verdict.ok:
        return Measurement(batch, max_error=verdict.max_error, problem=f"differs from eager: {verdict.message}")
    eager, optimized = _turns([lambda: original(*args), lambda: model(*args)])
    after = executable.run if isinstance(executable.run, GraphModule) else None
    return Measurement(
        batch,
        statistics.median(eager),
        statistics.median(optimized),
        statistics.median(e / o for e, o in zip(eager, optimized, strict=True)),
        verdict.max_error,
        spending=spending(executable.capture.graph, after, tensors),
    )


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
    with _no_gc():
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
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Measuring leaves buffers (batch norm's statistics in train mode) and the random state as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def _no_gc() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
