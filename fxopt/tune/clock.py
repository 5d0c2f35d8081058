"""The fastest run of each contender, interleaved, after a warm-up."""

from __future__ import annotations

import contextlib
import gc
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from fxopt.tune.cuda_graph import capture

_LONG = 0.05  # seconds; noise is short beside it
_SHORTEST = 50e-6  # one reading of the clock; shorter calls are repeated within it


def fastest(
    contenders: Sequence[Callable[[], object]], patience: float, fewest: int = 3, most: int = 40
) -> list[float]:
    """Seconds a call of each contender: the least of `fewest` to `most` rounds, for about `patience` seconds.

    A shared machine only ever adds time, so the least is what repeats; ratios of interleaved leasts hold within 3%.
    """
    repeats = []
    for function in contenders:
        once(function)
        seconds = once(function)
        repeats.append(max(1, min(20, int(_SHORTEST / max(seconds, 1e-7)))))
        fewest = 1 if seconds > _LONG else fewest
    best = [float("inf")] * len(contenders)
    started = time.perf_counter()
    for done in range(most):
        if done >= fewest and time.perf_counter() - started > patience:
            break
        for index, function in enumerate(contenders):
            best[index] = min(best[index], once(function, repeats[index]))
    return best


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """No garbage is collected in between timings."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def once(function: Callable[[], object], repeats: int = 1) -> float:
    """Seconds a call, of `repeats` calls in a row, until the device is done with them."""
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """What it launches, as a CUDA graph to replay; the function itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # libraries load and choose outside
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with capture(graph, side):
            function()
    except RuntimeError:
        return function
    return graph.replay


def all_captured(functions: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Contenders as CUDA graphs; as they are where one cannot be captured, which lost by its launches alone."""
    graphs = list(map(captured, functions))
    return list(functions) if any(map(operator.is_, graphs, functions)) else graphs


def on_device_of(values: Iterable[object]) -> contextlib.AbstractContextManager[object]:
    """To time what works on these tensors: streams, waits and captures are those of the current device."""
    device = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)
