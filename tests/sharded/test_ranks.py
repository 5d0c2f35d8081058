"""Two processes train a sharded model with and without fxopt: the same losses, plan, keys and collectives."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.launch import launch, outputs
from tests.sharded import ranks

pytest.importorskip("torchrec")
pytestmark = pytest.mark.slow  # the first of them waits for all the training

OPTIMIZED = [(loop, mode) for loop in ranks.LOOPS for mode in ranks.MODES if mode != "eager"]
NEAR = 1e-5


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str], list[int]]:
    """What each rank saw, what it printed, and how it ended."""
    folder = tmp_path_factory.mktemp("ranks")
    started = launch(["-m", "tests.sharded.ranks", folder])
    texts = outputs(started)
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), "\n".join(text[-3000:] for text in texts)
    return [json.loads(file.read_text()) for file in files], texts, [rank.returncode for rank in started]


@pytest.fixture(scope="module")
def found(session: tuple[list[dict[str, Any]], list[str], list[int]]) -> list[dict[str, Any]]:
    return session[0]


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
        assert len(set(captures)) == 2, captures  # what runs before the lookups arrive, and after
        assert len(captures) <= 5, captures  # a call with as many ids as rows, or one id, has a graph of its own


def test_a_collective_in_a_forward_runs_once_a_call(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["by_hand"] == {"calls": [1, 1, 1], "same": [True, True, True], "captures": 2}


@pytest.mark.parametrize("modes", ["eager-fast", "fast-eager"])
def test_a_checkpoint_continues_with_and_without(found: list[dict[str, Any]], modes: str) -> None:
    for rank in found:
        assert rank[modes] == pytest.approx(rank["own eager"]["losses"], rel=NEAR, abs=NEAR)


def test_a_killed_rank_ends_the_other_with_an_error(session: tuple[list[Any], list[str], list[int]]) -> None:
    _, texts, codes = session
    assert codes[0] in (1, -signal.SIGABRT) and codes[1] == -signal.SIGKILL  # gloo may abort before Python ends
    assert "Connection" in texts[0]
