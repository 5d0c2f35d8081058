from __future__ import annotations

import gc
import time

import pytest
import torch

from bench import timing
from bench.timing import NotInterleaved, measure, quartiles, ratio
from tests.bench.timed import timings


def sleeper(seconds: float):
    return lambda *_: time.sleep(seconds)


def test_ratio_is_base_over_other():
    slow, fast = timings(slow=(4.0, 4.0, 4.0), fast=(1.0, 2.0, 1.0)).values()
    assert ratio(slow, fast) == 4.0
    assert ratio(fast, slow) == 0.25


def test_ratio_is_paired_by_round():
    # The machine became three times slower half-way: the contenders did not change.
    base, other = timings(base=(2.0, 2.0, 6.0, 6.0), other=(1.0, 1.0, 3.0, 3.0)).values()
    assert ratio(base, other) == 2.0 and quartiles(base, other) == (2.0, 2.0)


def test_no_ratio_of_contenders_that_did_not_run_in_turns():
    one, other = (measure({"a": sleeper(0.0001)}, [()], seconds=0)["a"] for _ in range(2))
    with pytest.raises(NotInterleaved, match="two separate measurements"):
        ratio(one, other)
    with pytest.raises(NotInterleaved):
        quartiles(one, other)


def test_quartiles_tell_how_far_apart_the_rounds_were():
    base, other = timings(base=(1.0, 2.0, 3.0, 4.0, 5.0), other=(1.0,) * 5).values()
    assert quartiles(base, other) == (2.0, 4.0)


def test_of_a_hundred_calls_one_is_slower_than_p99():
    times = iter([0.0] * 4 + [0.0005] * 3 + [0.02] + [0.0005] * 10_000)
    found = measure({"a": lambda: time.sleep(next(times))}, [()], seconds=0.2)["a"]
    assert found.minimum <= found.median <= found.p99 < 0.02


def test_behind_other_work_the_caches_are_empty(monkeypatch):
    monkeypatch.setattr(timing, "OTHER_WORK", 1 << 22)
    seen = []
    fresh = timing.behind_other_work(lambda args: seen.append(args) or (args[0] + 1,))
    assert fresh((1,)) == (2,) and seen == [(1,)]
    slow = measure({"a": lambda x: None}, [(1,)], seconds=0, fresh=fresh)["a"]
    assert slow.median < 0.001, "what empties the caches is not timed"


def test_measure_tells_slow_from_fast():
    timings = measure({"slow": sleeper(0.004), "fast": sleeper(0.001)}, [()], seconds=0.1)
    assert 0.004 <= timings["slow"].minimum <= timings["slow"].median
    assert 1.5 < ratio(timings["slow"], timings["fast"]) < 5


def test_contenders_take_turns_and_order_alternates():
    calls = []
    measure({name: lambda name=name: calls.append(name) or time.sleep(0.03) for name in "ab"}, [()], seconds=0)
    turns = [name for i, name in enumerate(calls[4:]) if i == 0 or calls[4:][i - 1] != name]
    assert turns == ["b", "a", "b", "a"][: len(turns)] and len(turns) >= 3


def test_every_input_is_used_and_contenders_start_apart():
    seen = {"a": [], "b": []}
    measure({name: lambda x, s=s: s.append(x) for name, s in seen.items()}, [(i,) for i in range(10)], seconds=0)
    assert set(seen["a"]) == set(seen["b"]) == set(range(10))
    assert (seen["a"][0], seen["b"][0]) == (0, 5)


def test_fresh_arguments_are_made_outside_of_the_timed_region():
    def fresh(args: tuple) -> tuple:
        time.sleep(0.0005)
        return (args[0] + 1,)

    seen = set()
    timings = measure({"a": seen.add}, [(1,)], seconds=0.02, fresh=fresh)
    assert seen == {2}
    assert timings["a"].median < 0.0003


def test_no_gradients_and_no_garbage_collection_while_timing():
    state = set()
    measure({"a": lambda: state.add((gc.isenabled(), torch.is_grad_enabled()))}, [()], seconds=0)
    assert state == {(False, False)}
    assert gc.isenabled() and torch.is_grad_enabled()


def test_no_inputs():
    with pytest.raises(ValueError, match="at least one"):
        measure({"a": print}, [], seconds=0)
