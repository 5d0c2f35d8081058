"""Functions of math are terms for the thread that traces, and for nobody else."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fxopt.torch_internals.python_math import as_terms, is_of_numbers


class Tracer:
    pass


@pytest.fixture
def space() -> dict[str, Any]:
    """The globals of code that is traced by this thread."""
    space = {"math": math, "root": math.sqrt, "round": round}
    for owner, name, value in list(as_terms([space], Tracer())):
        setattr(owner, name, value)
    return space


def test_other_threads_have_pythons_own(space: dict[str, Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: (space["math"].sqrt, space["root"](4.0))).result()
    assert found == (math.sqrt, 2.0) and pickle.loads(pickle.dumps(found)) == found


def test_numbers_stay_numbers(space: dict[str, Any]) -> None:
    assert space["math"].sqrt is not math.sqrt and space["math"].sqrt(4) == space["root"](4) == 2.0
    assert (space["math"].pi, space["math"].floor, space["round"]) == (math.pi, math.floor, round)
    with pytest.raises(ValueError, match=r"math domain error|positive"):
        space["math"].log(0)
    with pytest.raises(AttributeError):
        _ = space["math"].nothing
    assert math.sqrt(4) == 2.0 and type(math.sqrt) is type(len)


def test_what_is_a_function_of_numbers() -> None:
    assert all(map(is_of_numbers, (math, math.sqrt, math.log)))
    assert not any(map(is_of_numbers, (math.floor, len, [], None)))
