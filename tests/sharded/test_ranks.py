"""Two processes train a sharded model with and without fxopt: the same losses, plan, keys and collectives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sharded import ranks

pytest.importorskip("torchrec")

SECONDS = 240  # 20 on two idle cores; a rank that waits for one that is gone must not hang the suite
OPTIMIZED = [(loop, mode) for loop in ranks.LOOPS for mode in ranks.MODES if mode != "eager"]
NEAR = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    started = launch([sys.executable, "-m", "tests.sharded.ranks", str(folder)])
    outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(text[-3000:] for text in outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def launch(command: list[str]) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(("loop", "mode"), OPTIMIZED)
def test_losses_are_those_of_eager(found: list[dict[str, Any]], loop: str, mode: str) -> None:
    for rank in found:
        eager, fast = rank[f"{loop} eager"], rank[f"{loop} {mode}"]
        assert len(fast["losses"]) == ranks.STEPS
        assert fast["losses"] == pytest.approx(eager["losses"], rel=NEAR, abs=NEAR)
        assert fast["dense"] == pytest.approx(eager["dense"], rel=NEAR, abs=NEAR)


@pytest.mark.parametrize(("loop", "mode"), OPTIMIZED)
def test_each_step_distributes_its_inputs_once(found: list[dict[str, Any]], loop: str, mode: str) -> None:
    """Two collections; a pipeline is one batch ahead."""
    ahead = 2 if loop == "pipeline" else 0
    for rank in found:
        fast = rank[f"{loop} {mode}"]
        expected = [min(2 * step + ahead, 2 * ranks.STEPS) for step in range(1, ranks.STEPS + 1)]
        assert fast["dists"] == expected == rank[f"{loop} eager"]["dists"]
        assert fast["messages"] == []  # nothing is reported as not pipelined


@pytest.mark.parametrize(("loop", "mode"), OPTIMIZED)
def test_plan_and_keys_are_those_of_eager(found: list[dict[str, Any]], loop: str, mode: str) -> None:
    for rank in found:
        eager, fast = rank[f"{loop} eager"], rank[f"{loop} {mode}"]
        assert (fast["plan"], fast["keys"]) == (eager["plan"], eager["keys"])
        assert all(way in fast["plan"] for way in ranks.WAYS.values())


@pytest.mark.parametrize(("loop", "mode"), OPTIMIZED)
def test_dense_parts_are_captured_once(found: list[dict[str, Any]], loop: str, mode: str) -> None:
    for rank in found:
        captures = rank[f"{loop} {mode}"]["captures"]
        assert len(captures) == len(set(captures)) == 2, captures  # what runs before the lookups arrive, and after


def test_a_collective_in_a_forward_runs_once_a_call(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["by_hand"] == {"calls": [1, 1, 1], "same": [True, True, True], "captures": 2}
