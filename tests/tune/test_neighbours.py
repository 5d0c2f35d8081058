"""What other processes use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from fxopt.tune import neighbours
from fxopt.tune.neighbours import Neighbours


def test_another_process_is_counted_and_this_one_is_not() -> None:
    if not os.path.exists("/proc/stat"):
        pytest.skip("there is no /proc/stat")
    quiet, started = Neighbours(), time.perf_counter()
    while time.perf_counter() - started < 0.5:
        pass
    alone = quiet.cores()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.2)
        crowded = Neighbours()
        time.sleep(0.5)
        used = crowded.cores()
        process.kill()
    assert used > min(0.4, len(os.sched_getaffinity(0)) - 0.6), used
    assert alone < used or alone > 0.5  # others were at work all the time


@pytest.mark.parametrize(
    ("threads", "used", "seconds", "crowded"),
    [(1, 2.0, 1, False), (2, 0.2, 1, False), (2, 1.0, 1, True), (1, 0.0, 1, False), (2, 1.0, 0.02, False)],
)
def test_threads_that_have_no_core_each(monkeypatch, threads, used, seconds, crowded) -> None:
    monkeypatch.setattr(neighbours, "_own_cores", lambda: {"cpu0", "cpu1"})
    monkeypatch.setattr(neighbours, "_TICK", 0.01)
    monkeypatch.setattr(Neighbours, "cores", lambda self: used)
    monkeypatch.setattr(Neighbours, "_elapsed", lambda self: seconds)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert bool(Neighbours().crowding()) is crowded


def test_no_proc(monkeypatch) -> None:
    monkeypatch.setattr(neighbours.Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert Neighbours().cores() < 0.01
