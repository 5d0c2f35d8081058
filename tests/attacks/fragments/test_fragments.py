"""Random Python facts, changed between calls: an optimized model sees every change."""

from __future__ import annotations

import pytest

from tests.attacks.attack import UNCHECKED
from tests.attacks.fragments.check import failure
from tests.attacks.fragments.program import fragment


@pytest.mark.parametrize("seed", range(24))
def test_fragment(seed: int) -> None:
    assert not failure(fragment(seed), UNCHECKED)
