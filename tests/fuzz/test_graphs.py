"""Random graphs: the optimized one is the eager one, at sizes that parted, with nothing that hides an error."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.check import check
from tests.fuzz.worker import PROGRAMS

GRAPHS = 50  # a part
PASSES = {"dense": 10, "aliases": 2}  # that have to have found something, so that there was something to be wrong


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), [*(("dense", part) for part in range(4)), ("aliases", 0), ("aliases", 1)])
def test_random_graphs(kind: str, part: int) -> None:
    seen: Counter[str] = Counter()
    failures = {}
    for seed in range(part * GRAPHS, (part + 1) * GRAPHS):
        failure = check(PROGRAMS[kind](seed), seen)
        if failure is not None:
            failures[seed] = str(failure)
    assert not failures, f"python -m tests.fuzz --kind {kind} --show SEED shrinks each of {failures}"
    assert sum(name.startswith("pass ") for name in seen) >= PASSES[kind], seen
    assert seen["captures"] > 5 * seen["eager"], seen
    assert seen["raised"] < 0.3 * seen["calls"], seen


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_seed_is_a_program(kind: str) -> None:
    program = PROGRAMS[kind]
    assert [program(seed).source() for seed in range(20)] == [program(seed).source() for seed in range(20)]
