"""Whether the graph around opaque submodules is faster than eager, as calls tell that take turns.

No race ahead of calls could tell: an opaque submodule may do what nobody can take back, and what a call keeps to undo
it costs time as well. So each call runs once, on one side, and is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxopt.findings import Findings, Miss, PassFindings, Place

TURNS, _BEST = 16, 4  # of each side; where a machine has 6 times as much to do as cores, the least of 8 was often wrong


class Turns:
    """Calls of one capture, each by its graph or by eager. Of calls that record gradients the forward is timed.

    What a graph's checks cost does not grow with the inputs, and what it gains does: calls of as many numbers, up to a
    factor of 2, are compared with each other.

    Args:
        findings: get to know where eager is faster.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._seconds: dict[int, tuple[list[float], list[float]]] = {}  # by size: of the graph, of eager
        self._by_eager: dict[int, bool] = {}

    @property
    def all_by_eager(self) -> bool:
        """Whether the graph was faster at no size that came so far, and all are decided."""
        return bool(self._seconds) and all(map(self._by_eager.get, list(self._seconds)))

    def run(self, inputs: Sequence[Tensor], graph: Callable[[], Any], eager: Callable[[], Any]) -> Any:
        """What one of the two gives."""
        size = sum(map(Tensor.numel, inputs)).bit_length()
        if (by_eager := self._by_eager.get(size)) is not None:
            return eager() if by_eager else graph()
        seconds = self._seconds.setdefault(size, ([], []))
        turn = len(seconds[1]) < len(seconds[0])
        started = time.perf_counter()
        result = eager() if turn else graph()
        seconds[turn].append(time.perf_counter() - started)
        if min(map(len, seconds)) >= TURNS:
            self._decide(size, *(sum(sorted(each)[:_BEST]) for each in seconds))
        return result

    def _decide(self, size: int, graph: float, eager: float) -> None:
        if self._by_eager.setdefault(size, eager < graph) and eager < graph:
            numbers = f"{1 << size >> 1:,} to {(1 << size) - 1:,} numbers"
            reason = (
                f"calls with {numbers} are eager's: the graph around opaque submodules was {eager / graph:.2f}x as "
                "fast. Config(tune='off') keeps it"
            )
            self._findings.passes.append(PassFindings("turns", misses=[Miss("turns", reason, Place())]))
