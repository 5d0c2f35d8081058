"""Every graph that was ever wrong is right."""

from __future__ import annotations

import pytest

from tests.fuzz.corpus import barriers, dense, effects, gradients, outputs, sizes
from tests.fuzz.corpus.case import Case

CASES = {
    f"{module.__name__.split('.')[-1]}-{name}": case
    for module in (barriers, dense, effects, gradients, outputs, sizes)
    for name, case in vars(module).items()
    if isinstance(case, Case)
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_corpus(case: Case) -> None:
    failure = case.failure()
    assert failure is None, failure
