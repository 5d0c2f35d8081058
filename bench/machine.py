"""What a figure depends on besides the code: the machine, printed above every table and stored with saved results."""

from __future__ import annotations

import json
import os
import platform
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results")


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


def header(machine: dict[str, Any]) -> str:
    return "{cpu}, {cores} cores, {isa}, {threads} threads, torch {torch}, {date}".format(**machine)


def save(benchmark: str, results: dict[str, Any], to: str | None = None) -> Path:
    """Writes JSON to `to`, else into bench/results/ under a name with the date and the CPU."""
    cpu = "-".join("".join(c if c.isalnum() else " " for c in cpu_name()).split())
    path = Path(to) if to else RESULTS / f"{benchmark}_{date.today()}_{cpu}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **results}, indent=1) + "\n")
    return path
