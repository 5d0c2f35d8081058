"""Times of calls that are compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter


def interleaved_medians(calls: Mapping[str, Callable[[], object]], seconds: float = 1.0) -> dict[str, float]:
    """Median seconds of each call, taken in turns so that a busy moment of the machine hits all of them alike.

    Runs for about `seconds` in all, after two unmeasured rounds; at least five rounds.
    """
    for _ in range(2):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = 0
    end = perf_counter() + seconds
    while rounds < 5 or perf_counter() < end:
        for name, call in calls.items():
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
        rounds += 1
    return {name: median(values) for name, values in times.items()}
