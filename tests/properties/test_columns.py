"""At least 2,000 random models: the optimized one is the eager one, at every size, forward and backward."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import given, settings

from tests.properties.check import check
from tests.properties.graphs import programs
from tests.properties.programs import Program

GRAPHS, PARTS = 2000, 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_models(part: int) -> None:
    seen: Counter[str] = Counter()

    @hypothesis.seed(part)
    @settings(max_examples=GRAPHS // PARTS, database=None)
    @given(programs())
    def run(program: Program) -> None:
        hypothesis.assume(check(program, seen))

    run()
    assert seen["graphs"] >= GRAPHS // PARTS
    assert seen["optimized"] > 0.9 * seen["graphs"], seen
    assert seen["raised"] < 0.3 * seen["runs"], seen
