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
# A line goes when what it names is right: strict, so that it has to.
STILL_WRONG = {
    "barriers-MONOTONE_EXPERTS": "the attempt to capture edits weights",
    "dense-MeanOfAComparison": "requires_grad of what has no gradient",
    "dense-TowersTimesRows": "a reshape to -1 beside 0",
    "dense-FilledBehindATranspose": "strides of masked_fill",
    "effects-COUNTER_VERIFIED": "the first call is applied more than once",
    "effects-MOVING_MEAN_AT_THE_FIRST_CALL": "the first call is applied more than once",
    "effects-TEACHER": "the attempt to capture edits weights",
    "effects-TEACHER_AT_THE_FIRST_CALL": "the attempt to capture edits weights",
    "effects-EDITS_THEN_FAILS": "a call that fails edits twice",
    "effects-EDITS_THEN_FAILS_VERIFIED": "a call that fails edits twice",
    "effects-AveragingBatchNorm": "a call that fails edits twice",
}


def _marked(name: str, case: Case) -> object:
    reason = STILL_WRONG.get(name)
    return pytest.param(case, id=name, marks=[pytest.mark.xfail(strict=True, reason=reason)] if reason else [])


@pytest.mark.parametrize("case", [_marked(name, case) for name, case in CASES.items()])
def test_corpus(case: Case) -> None:
    failure = case.failure()
    assert failure is None, failure
