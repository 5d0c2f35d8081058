"""Random dense graphs: the optimized one is the eager one, at sizes that parted, with nothing that hides an error."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz import dense
from tests.fuzz.check import check

GRAPHS, PARTS = 200, 4
PASSES = 10  # that have to have found something, so that there was something to be wrong


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs(part: int) -> None:
    seen: Counter[str] = Counter()
    failures = {}
    for seed in range(part, GRAPHS, PARTS):
        failure = check(dense.program(seed), seen)
        if failure is not None:
            failures[seed] = str(failure)
    assert not failures, f"python -m tests.fuzz --kind dense --show SEED shrinks each of {failures}"
    assert sum(name.startswith("pass ") for name in seen) >= PASSES, seen
    assert seen["captures"] > 5 * seen["eager"], seen
    assert seen["raised"] < 0.3 * seen["calls"], seen


def test_a_seed_is_a_program() -> None:
    assert [dense.program(seed).source() for seed in range(20)] == [dense.program(seed).source() for seed in range(20)]
