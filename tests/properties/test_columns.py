"""At least 2,000 random models: the optimized one is the eager one, at every size, forward and backward.

`python -m tests.fuzz --kind columns` makes more of them.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.properties.check import check
from tests.properties.graphs import random_program

GRAPHS, PARTS = 2000, 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_models(part: int) -> None:
    seen: Counter[str] = Counter()
    seed = 1_000_000 * part
    while seen["graphs"] < GRAPHS // PARTS:
        seed += 1
        torch.manual_seed(seed)
        program = random_program(random.Random(seed).choice)
        try:
            check(program, seen)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{program!r}") from error
    assert seed - 1_000_000 * part < 1.1 * seen["graphs"], "too many models reject their own example"
    assert seen["optimized"] > 0.9 * seen["graphs"], seen
    assert seen["raised"] < 0.3 * seen["runs"], seen
