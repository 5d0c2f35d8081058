"""Timings of contenders that ran in turns, without running anything."""

from __future__ import annotations

from bench.cells import Cell
from bench.timing import Timing


def timings(**rounds: tuple[float, ...]) -> dict[str, Timing]:
    run = object()
    return {name: Timing(each, min(each), max(each), run) for name, each in rounds.items()}


def cell(name: str, batch: int, **seconds: float) -> Cell:
    found = timings(**{who: (each,) * 3 for who, each in seconds.items()})
    return Cell((name, str(batch)), "eager", found, dict.fromkeys(found, 0.0), {})
