"""The fastest run of each contender, interleaved, after a warm-up."""

from __future__ import annotations

import contextlib
import gc
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from fxopt.tune.cuda_graph import capture

_LONG, _LONGEST = 0.05, 0.25  # seconds; noise is short beside it, and a second run says enough
_SHORTEST = 50e-6  # one reading of the clock; shorter calls are repeated within it
# A host takes 3 to 25 us to launch a graph, so of short ones that is all one sees. On an H100, three small kernels
# against one: 11.4 us and 11.4 us as graphs of one call, 4.9 us and 1.5 us a call as graphs of ten. Longer ones stay
# one call: ten of what runs on two streams took 57 us each, and one by itself 53 (they share no memory).
_SHORT_REPLAY, _CALLS_OF_SHORT = 40e-6, 10


def fastest(
    contenders: Sequence[Callable[[], object]], patience: float, fewest: int = 3, most: int = 40
) -> list[float]:
    """Seconds a call of each contender: the least of `fewest` to `most` rounds, for about `patience` seconds.

    A shared machine only ever adds time, so the least is what repeats; ratios of interleaved leasts hold within 3%.
    """
    warm = []
    for function in contenders:
        once(function)
        warm.append(once(function))
    if min(warm) > _LONGEST:
        return warm
    repeats = [max(1, min(20, int(_SHORTEST / max(seconds, 1e-7)))) for seconds in warm]
    fewest = 1 if max(warm) > _LONG else fewest
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


def captured(function: Callable[[], object], calls: int = 1) -> Callable[[], object]:
    """What so many calls launch, as a CUDA graph to replay; the function itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # libraries load and choose outside
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with capture(graph, side):
            for _ in range(calls):
                function()
    except RuntimeError:
        return function
    return graph.replay


def all_captured(functions: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Contenders as CUDA graphs, of several calls each where all are short; as they are where one cannot be captured,
    which lost by its launches alone.
    """
    graphs = list(map(captured, functions))
    if any(map(operator.is_, graphs, functions)):
        return list(functions)
    if max(min(once(graph), once(graph)) for graph in graphs) < _SHORT_REPLAY:
        graphs = [captured(function, _CALLS_OF_SHORT) for function in functions]
    return graphs


def on_device_of(values: Iterable[object]) -> contextlib.AbstractContextManager[object]:
    """To time what works on these tensors: streams, waits and captures are those of the current device."""
    device = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)
