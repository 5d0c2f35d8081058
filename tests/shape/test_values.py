"""Sets of values: every operation against the same operation on plain Python sets."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from fxopt.shape.ranges.algebra import cast, rounded
from fxopt.shape.ranges.values import Values

UNIVERSE = range(-12, 13)


def as_set(values: Values) -> set[int]:
    return {number for number in UNIVERSE if number in values}


def random_values(rng: random.Random) -> Values:
    ends = [sorted((rng.choice(UNIVERSE), rng.choice(UNIVERSE))) for _ in range(rng.randint(0, 4))]
    return Values(tuple((low, high) for low, high in ends))


@pytest.mark.parametrize("seed", range(20))
def test_operations_are_those_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        left, right = random_values(rng), random_values(rng)
        assert as_set(left | right) == as_set(left) | as_set(right)
        assert as_set(left & right) == as_set(left) & as_set(right)
        assert as_set(left.without(right)) == as_set(left) - as_set(right)
        assert left.within(right) == (as_set(left) <= as_set(right))
        assert bool(left) == bool(as_set(left))


def test_intervals_are_tidy() -> None:
    assert Values(((5, 7), (1, 2), (3, 4))).intervals == ((1, 7),)
    assert Values(((0.0, 1.0), (1.5, 2.0))).intervals == ((0.0, 1.0), (1.5, 2.0))
    assert math.copysign(1.0, Values.only(-0.0).min) == 1.0
    assert Values.only(*range(0, 200, 5)).min == 0
    assert len(Values.only(*range(0, 200, 5)).intervals) <= 16
    assert all(number in Values.only(*range(0, 200, 5)) for number in range(0, 200, 5))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (Values.between(0, 100), "[0, 100]"),
        (Values.only(-1), "{-1}"),
        (Values(((-5, -1), (1, 9))), "[-5, -1] or [1, 9]"),
        (Values(((0.0, 1.5),), nan=True), "[0, 1.5] or NaN"),
        (Values(), "nothing"),
    ],
)
def test_text(values: Values, text: str) -> None:
    assert str(values) == text


def test_nan_is_one_of_the_values() -> None:
    nan, numbers = Values((), nan=True), Values.between(0.0, 1.0)
    assert (nan | numbers).nan and not (nan & numbers)
    assert not (nan | numbers).within(numbers) and numbers.within(nan | numbers)
    assert math.nan in nan and math.nan not in numbers
    assert Values.only(1.0, math.nan) == Values(((1.0, 1.0),), nan=True)


def test_floats_leave_a_hole() -> None:
    numbers = Values.between(0.0, 1.0).without(Values.only(0.5))
    assert 0.5 not in numbers and 0.25 in numbers and 0.75 in numbers
    assert math.nextafter(0.5, 1.0) in numbers


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_what_is_left_of_a_dtype(dtype: torch.dtype) -> None:
    everything = Values.of_dtype(dtype)
    assert everything.without(Values()) == everything
    assert not everything.without(everything)
    assert 1 not in everything.without(Values.only(1)) and 0 in everything.without(Values.only(1))


EXTREMES = [
    *range(-50, 51),
    127,
    128,
    255,
    256,
    2**24 + 1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
]
HALVES = [n / 4 for n in range(-50, 51)] + [
    1e10,
    2.0**63,
    -(2.0**63),
    3.5e38,
    1e-40,
    -1e-50,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
def test_cast_of_integers(target: torch.dtype) -> None:
    """Single numbers: where a claim is made that is not everything, it is what torch makes of them."""
    for number in EXTREMES:
        got = torch.tensor(number, dtype=torch.int64).to(target).item()
        claimed = cast(Values.only(number), target)
        assert int(got) in claimed
        if int(got) == number:
            assert claimed == Values.only(number)


@pytest.mark.parametrize("source", [torch.int64, torch.float64])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_that_of_torch(source: torch.dtype, target: torch.dtype) -> None:
    for number in EXTREMES if source == torch.int64 else [n for n in HALVES if n == n]:
        number = number if source == torch.int64 else float(number)
        assert rounded(number, target) == torch.tensor(number, dtype=source).to(target).item(), number


def test_undefined_conversions_are_everything() -> None:
    for number in (math.nan, math.inf, 1e30, 2.0**63):
        assert cast(Values.only(number), torch.int64) == Values.of_dtype(torch.int64)
    assert cast(Values.only(-0.9, 5.9), torch.int64) == Values.only(0, 5)
    assert cast(Values.only(math.nan, 0.5), torch.bool) == Values.only(1)
    assert cast(Values.between(0, 300), torch.uint8) == Values.of_dtype(torch.uint8)


def test_limits_of_merging() -> None:
    """Whatever is merged, nothing is lost."""
    numbers = list(itertools.accumulate(range(40)))
    assert all(number in Values.only(*numbers) for number in numbers)
