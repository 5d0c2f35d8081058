"""The sanitizers' command: a small part of it, and that it sees a bug."""

from __future__ import annotations

import os

import pytest

from tests import sanitize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sanitize.libraries(os.environ.get("CXX", "g++")), reason="the compiler has no sanitizers"),
]


def test_nothing_is_reported_of_hostile_calls():
    told = sanitize.run((*sanitize.HOSTILE, "--share", "10", "-k", "pointwise|k_largest"))
    assert told.clean, told.text[-4000:]


@pytest.mark.parametrize("mutant", sanitize.MUTANTS, ids=lambda mutant: mutant.file)
def test_planted_bugs_are_reported(mutant):
    told = sanitize.planted(mutant)
    assert told.reported and not told.clean, told.text[-4000:]
