"""How much of the machine other processes use, since threads that wait for a core make every time a lie."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.0  # seconds, to which the time of a core is known
_CROWDED = 0.4  # of a core that is missing; a quiet machine's own processes use less than 0.1


class Neighbours:
    """What other processes use of this process's cores, from the moment when this object is made."""

    def __init__(self) -> None:
        self._cores = _own_cores()
        self._started, self._used = time.perf_counter(), self._seconds_of_others()

    def cores(self) -> float:
        """Cores that others have used on average, 0.0 where there is no /proc."""
        used = self._seconds_of_others() - self._used
        return max(0.0, used / self._elapsed())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def share(self) -> float:
        return self.cores() / max(1, len(self._cores))

    def crowding(self) -> str:
        """Why PyTorch's threads had to wait for one another; "" where each had a core."""
        threads = torch.get_num_threads()
        rounded = len(self._cores) * _TICK / self._elapsed()  # much of a short moment
        if threads < 2 or (cores := self.cores()) + threads <= len(self._cores) + _CROWDED + rounded:
            return ""
        return f"other processes used {cores:.1f} of {len(self._cores)} cores, and PyTorch has {threads} threads"

    def _seconds_of_others(self) -> float:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return 0.0
        busy = sum(map(_busy, (line.split() for line in lines if line.split(" ")[0] in self._cores)))
        own = os.times()
        return busy * _TICK - own.user - own.system - own.children_user - own.children_system


def _own_cores() -> set[str]:
    """Their names in /proc/stat."""
    numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {f"cpu{number}" for number in numbers}


def _busy(fields: list[str]) -> int:
    """Ticks of a core that were neither idle nor waiting for a disk."""
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in fields[1:9])
    return user + nice + system + irq + softirq + steal
