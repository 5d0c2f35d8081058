"""Whether times are believed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from fxopt.report import turns
from fxopt.report.turns import Turns, taken


def timed(low: float, high: float, ran: float = 1.0) -> Turns:
    return Turns((1.0, 0.5), (1.0, 2.0), (low, high), ran)


def tries(monkeypatch: pytest.MonkeyPatch, *found: Turns) -> list[Turns]:
    """What each try of `taken` finds; the list of those that ran."""
    left, ran = iter(found), list[Turns]()

    def once_round(calls: object) -> Turns:
        ran.append(next(left))
        return ran[-1]

    monkeypatch.setattr(turns, "_once_round", once_round)
    return ran


def test_a_calm_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tries(monkeypatch, timed(1.9, 2.1))
    assert taken([]).distrust == "" and len(ran) == 1


def test_threads_without_cores_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = replace(timed(2.0, 2.0), crowding="other processes used 1.0 of 2 cores, and PyTorch has 2 threads")
    ran = tries(monkeypatch, crowded, crowded, timed(1.0, 1.5))
    assert taken([]) == timed(1.0, 1.5) and len(ran) == 3
    tries(monkeypatch, crowded, crowded, crowded)
    assert taken([]).distrust == f"machine busy, do not trust: {crowded.crowding}"


def test_a_thread_that_hardly_ran_is_believed_less() -> None:
    assert timed(1.0, 1.5, ran=0.7).distrust == ""
    assert timed(1.0, 1.5, ran=0.2).distrust


@pytest.mark.parametrize("first", [timed(1.0, 2.0), timed(1.9, 2.1, ran=0.5)])
def test_a_busy_one_is_asked_again(monkeypatch: pytest.MonkeyPatch, first: Turns) -> None:
    ran = tries(monkeypatch, first, timed(1.9, 2.0))
    assert taken([]) == timed(1.9, 2.0) and len(ran) == 2


def test_the_calmest_of_three_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tries(monkeypatch, timed(1.0, 3.0), timed(1.5, 2.0), timed(1.0, 2.0))
    found = taken([])
    assert found == timed(1.5, 2.0) and len(ran) == 3
    assert found.distrust == ""


def test_what_no_try_tells_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    tries(monkeypatch, *[timed(2.9, 440, ran=0.3)] * 3)
    expected = "machine busy, do not trust: half of the rounds lie between 2.9x and 4.4e+02x"
    assert taken([]).distrust == f"{expected}, and this thread had a core for 30% of the time"


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.0)
    monkeypatch.setattr(turns, "SLICE", 1e-9)
    monkeypatch.setattr(turns, "TRIES", 1)
    called: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: called.append(name)

    found = taken([call("eager"), call("fxopt"), call("other")])
    assert len(found.seconds) == len(found.ratios) == 3 and found.ratios[0] == 1
    order = [name for name, _ in itertools.groupby(called)][3:]
    assert order == ["eager", "fxopt", "other"] * turns.FEWEST_ROUNDS
