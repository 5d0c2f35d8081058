"""What a figure depends on besides the code: the machine, and who else used it meanwhile."""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results")
BUSY = 0.05  # with 2 threads on 2 cores, one foreign process made a 0.9 ms call take 23 ms


def describe() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "date": datetime.now().isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def header() -> str:
    return "{cpu}, {cores} cores, {isa}, {threads} threads, torch {torch}, {date}".format(**describe())


class Neighbours:
    """The share of all cores that other processes used since this object was made (0.0 where there is no /proc)."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.others = _cpu_seconds_of_others()

    def share(self) -> float:
        used = _cpu_seconds_of_others() - self.others
        return max(0.0, used / ((time.perf_counter() - self.start) * (os.cpu_count() or 1)))

    def said(self) -> str:
        """What stands under a table: who else used the machine."""
        share = self.share()
        noisy = "noisy, do not publish: " if share > BUSY else ""
        return f"{noisy}other processes used {share:.0%} of the machine meanwhile"


def _cpu_seconds_of_others() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in fields[:8])
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - own.user - own.system - own.children_user - own.children_system


def result(benchmark: str) -> Path:
    """The file in bench/results/ for results of today on this machine."""
    cpu = "-".join("".join(c if c.isalnum() else " " for c in cpu_name()).split())
    return RESULTS / f"{benchmark}_{date.today()}_{cpu}.json"


def save(benchmark: str, results: dict[str, Any], to: str | None = None) -> Path:
    """Writes JSON to `to`, else into bench/results/ under a name with the date and the CPU."""
    path = Path(to) if to else result(benchmark)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **results}, indent=1) + "\n")
    return path
