"""What a figure depends on besides the code: the machine, and who else used it meanwhile."""

from __future__ import annotations

import json
import os
import platform
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch

from fxopt.tune import neighbours

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


class Neighbours(neighbours.Neighbours):
    def said(self) -> str:
        """What stands under a table: who else used the machine."""
        share = self.share()
        noisy = "noisy, do not publish: " if share > BUSY else ""
        return f"{noisy}other processes used {share:.0%} of the machine meanwhile"


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
