"""Several callables timed in turns in one run, so that the noise of a shared machine hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxopt.tune.clock import no_gc

SLICE = 0.02  # seconds a contender keeps the machine in one round
MOST_CALLS = 200  # of one contender in one round
FEWEST_ROUNDS = 3
OTHER_WORK = 1 << 25  # numbers that other work edits: 128 MiB, more than the last cache that a core can reach


class NotInterleaved(ValueError):
    """A ratio was asked for whose sides did not run in turns."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of each round, the fastest call of all, and the one that 99 of 100 calls beat.

    run: what its contenders share who were timed in the same turns.
    """

    rounds: tuple[float, ...]
    minimum: float
    p99: float
    run: object

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def ratio(base: Timing, other: Timing) -> float:
    """base / other: above 1, `other` is the faster one. Paired by round, so slow drift cancels.

    Raises:
        NotInterleaved: the two were not timed in turns.
    """
    return statistics.median(_ratios(base, other))


def quartiles(base: Timing, other: Timing) -> tuple[float, float]:
    """Half of the rounds' ratios lie between these; raises as `ratio` does."""
    first, _, third = statistics.quantiles(_ratios(base, other), n=4, method="inclusive")
    return first, third


def _ratios(base: Timing, other: Timing) -> list[float]:
    if base.run is not other.run:
        raise NotInterleaved("ratio: expected two contenders that were timed in turns, found two separate measurements")
    return [b / o for b, o in zip(base.rounds, other.rounds, strict=True)]


def behind_other_work(fresh: Callable[[tuple], tuple]) -> Callable[[tuple], tuple]:
    """`fresh`, and then work that empties the caches: what is timed next finds nothing in them."""
    work = torch.zeros(OTHER_WORK)

    def made(args: tuple) -> tuple:
        args = fresh(args)
        work.add_(1)
        return args

    return made


def measure(
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple],
    seconds: float = 2.0,
    fresh: Callable[[tuple], tuple] = lambda args: args,
) -> dict[str, Timing]:
    """Times `contender(*args)` for each contender, taking turns until `seconds` are over.

    Args:
        inputs: argument tuples, used in rotation (more than one keeps a big table out of the caches).
        fresh: makes the arguments of each call from such a tuple, outside the timed region.
    """
    if not inputs:
        raise ValueError("measure: expected at least one tuple of arguments, found none")
    with torch.no_grad(), no_gc():
        apart = max(1, len(inputs) // max(1, len(contenders)))  # nobody finds the rows another has just loaded
        turns = {name: _Turns(call, inputs, fresh, i * apart) for i, (name, call) in enumerate(contenders.items())}
        deadline = time.perf_counter() + seconds
        done = 0
        while done < FEWEST_ROUNDS or time.perf_counter() < deadline:
            order = list(turns.values())
            for turn in order if done % 2 else reversed(order):
                turn.round()
            done += 1
    run = object()
    return {name: turn.timing(run) for name, turn in turns.items()}


class _Turns:
    """One contender's calls so far. The first calls, and the first of each round, are warm-up and not counted."""

    def __init__(
        self, call: Callable[..., Any], inputs: Sequence[tuple], fresh: Callable[[tuple], tuple], start: int
    ) -> None:
        self.call, self.inputs, self.fresh = call, inputs, fresh
        self.medians: list[float] = []
        self.times: list[float] = []
        self.next = start
        self.once()
        begun = time.perf_counter()
        self.once()  # with what makes its arguments, which may take longer than the call
        self.calls = max(1, min(MOST_CALLS, int(SLICE / (time.perf_counter() - begun))))

    def once(self) -> float:
        args = self.fresh(self.inputs[self.next % len(self.inputs)])
        self.next += 1
        start = time.perf_counter()
        self.call(*args)
        return time.perf_counter() - start

    def round(self) -> None:
        self.once()
        times = [self.once() for _ in range(self.calls)]
        self.medians.append(statistics.median(times))
        self.times += times

    def timing(self, run: object) -> Timing:
        ordered = sorted(self.times)
        return Timing(tuple(self.medians), ordered[0], ordered[int(0.99 * (len(ordered) - 1) + 0.5)], run)
