"""Contenders timed in turns, and whether the times can be believed on a machine that others use as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxopt.tune.clock import no_gc, once
from fxopt.tune.neighbours import Neighbours

SECONDS = 1.5  # of timing for one batch size, one try
FEWEST_ROUNDS = 5
SLICE = 0.01  # seconds a contender keeps the machine in one round
TRIES = 3
CALM = 1.25  # upper by lower quartile of the ratio that needs no second try
BELIEVED = 1.6  # and that is believed after the last one, unless the thread hardly ran
_RAN = 0.9  # of the time this thread ran, where nobody else had its core
_HARDLY = 0.5


@dataclass(frozen=True)
class Turns:
    """Seconds of each contender, medians over the rounds, and how the first one compares with each.

    Attributes:
        ratios: median over the rounds of first / contender; quartiles: of the same, for the second one.
        ran: CPU time of this thread over wall time; below 1, it waited for the machine. A GPU is waited for: 1.
        crowding: why other threads of PyTorch waited, while this one waited for them without giving up its core; or "".
    """

    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    quartiles: tuple[float, float]
    ran: float
    crowding: str = ""

    @property
    def spread(self) -> float:
        low, high = self.quartiles
        return high / low

    @property
    def calm(self) -> bool:
        return self.spread <= CALM and self.ran >= _RAN and not self.crowding

    @property
    def distrust(self) -> str:
        """Why the ratio says nothing; "" where it can be believed."""
        if self.crowding:
            return f"machine busy, do not trust: {self.crowding}"
        if self.spread <= (CALM if self.ran < _HARDLY else BELIEVED):
            return ""
        low, high = self.quartiles
        waited = f", and this thread had a core for {self.ran:.0%} of the time" if self.ran < _RAN else ""
        return f"machine busy, do not trust: half of the rounds lie between {low:.2g}x and {high:.2g}x{waited}"


def taken(calls: Sequence[Callable[[], Any]]) -> Turns:
    """The calmest of a few tries; the first calm one ends them."""
    tries: list[Turns] = []
    while len(tries) < TRIES and not (tries and tries[-1].calm):
        tries.append(_once_round(calls))
    return min(tries, key=lambda turns: (bool(turns.crowding), turns.spread))


def _once_round(calls: Sequence[Callable[[], Any]]) -> Turns:
    started, worked, neighbours = time.perf_counter(), time.thread_time(), Neighbours()
    rounds = _rounds(calls)
    ran, crowding = (time.thread_time() - worked) / (time.perf_counter() - started), neighbours.crowding()
    if torch.cuda.is_initialized():
        ran, crowding = 1.0, ""
    ratios = [[first / own for first, own in zip(rounds[0], each, strict=True)] for each in rounds]
    low, _, high = statistics.quantiles(ratios[1], n=4)
    seconds = tuple(statistics.median(each) for each in rounds)
    return Turns(seconds, tuple(map(statistics.median, ratios)), (low, high), ran, crowding)


def _rounds(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """The least seconds of each call in each round: a shared machine only ever adds time, and turns let it hit all."""
    rounds: list[list[float]] = [[] for _ in calls]
    with no_gc():
        counts = [max(1, int(SLICE / min(once(call), once(call)))) for call in calls]
        deadline = time.perf_counter() + SECONDS
        while len(rounds[0]) < FEWEST_ROUNDS or time.perf_counter() < deadline:
            for call, count, leasts in zip(calls, counts, rounds, strict=True):
                call()  # brings its own data back into the caches
                leasts.append(min(once(call) for _ in range(count)))
    return rounds
