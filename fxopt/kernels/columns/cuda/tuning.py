"""Builds of the kernel with other balances of warps, registers and cache, tried by an explicit :func:`tune`.

The levers are those of "Pushing the Performance Envelope of DNN-based Recommendation Systems Inference on GPUs"
(Jain et al., MICRO 2024): occupancy, loads in flight, rows that stay in L2, cp.async into shared memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from . import load, use

DEFAULT = "2 blocks, 8 loads"
VARIANTS = {
    DEFAULT: (),
    "3 blocks, 4 loads": ("-DFXOPT_BLOCKS=3", "-DFXOPT_LOADS=4"),
    "4 blocks, 4 loads": ("-DFXOPT_BLOCKS=4", "-DFXOPT_LOADS=4"),
    "rows kept in L2": ("-DFXOPT_KEEP_ROWS",),
    "narrow rows staged": ("-DFXOPT_STAGED",),  # wins 4-10% of narrow bags
}
_GAIN = 0.98  # of the default's time: less may be noise
_ROUNDS, _REPLAYS = 7, 20


def tune(call: Callable[[], object]) -> dict[str, float]:
    """Times `call` with every build and keeps the fastest for this process; the default, unless one wins by 2%.

    Args:
        call: of an optimized model, on one CUDA device, without gradients; it is captured into a graph, so that the
            device's time counts and not the host's. A graph captured before keeps its build: tune first.

    Returns:
        Microseconds of each build (VARIANTS).

    Raises:
        BuildError: there is no nvcc. A build takes 10 s where it is not cached.
    """
    load(torch.cuda.current_device())
    times = {}
    for name, flags in VARIANTS.items():
        use(flags)
        times[name] = _microseconds(call)
    best = min(times, key=times.__getitem__)
    use(VARIANTS[best if times[best] < _GAIN * times[DEFAULT] else DEFAULT])
    return times


def _microseconds(call: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    rounds = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / _REPLAYS)
    return statistics.median(rounds)
