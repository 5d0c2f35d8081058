"""Sets of numbers that a tensor's elements may be: disjoint closed intervals, and perhaps NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

Number = int | float
Interval = tuple[Number, Number]

_MOST_INTERVALS = 16


@dataclass(frozen=True)
class Values:
    """What the elements of a tensor may be. Ends are ints for integer and bool tensors, floats for floating ones.

    intervals: closed, disjoint, ascending, whatever was given. -0.0 is 0.0. None at all: no element exists.
    nan: whether NaN is among them.
    """

    intervals: tuple[Interval, ...] = ()
    nan: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "intervals", _tidy(self.intervals))

    @classmethod
    def between(cls, low: Number, high: Number) -> Values:
        return cls(((low, high),)) if low <= high else cls()

    @classmethod
    def only(cls, *numbers: Number) -> Values:
        return cls(tuple((n, n) for n in numbers if n == n), any(n != n for n in numbers))

    @staticmethod
    def of_dtype(dtype: torch.dtype) -> Values:
        """Everything that a tensor of `dtype` can hold."""
        return _everything(dtype)

    @property
    def min(self) -> Number:
        """The least number; raises IndexError where there is none."""
        return self.intervals[0][0]

    @property
    def max(self) -> Number:
        return self.intervals[-1][1]

    @property
    def number(self) -> Number | None:
        """The one number that all of them are, None where there are more, or none, or NaN."""
        return self.min if len(self.intervals) == 1 and self.min == self.max and not self.nan else None

    @property
    def hull(self) -> Values:
        """One interval around all of them."""
        return Values(((self.min, self.max),), self.nan) if len(self.intervals) > 1 else self

    def __bool__(self) -> bool:
        return bool(self.intervals) or self.nan

    def __contains__(self, number: Number) -> bool:
        return any(low <= number <= high for low, high in self.intervals) if number == number else self.nan

    def __or__(self, other: Values) -> Values:
        return self if self == other else Values(self.intervals + other.intervals, self.nan or other.nan)

    def __and__(self, other: Values) -> Values:
        both = ((max(a, c), min(b, d)) for a, b in self.intervals for c, d in other.intervals)
        return Values(tuple((low, high) for low, high in both if low <= high), self.nan and other.nan)

    def without(self, other: Values) -> Values:
        """These less `other`'s. Beside a float that goes, the next double remains: nearer than any narrower float."""
        left = list(self.intervals)
        for low, high in other.intervals:
            left = [part for interval in left for part in _cut(interval, low, high)]
        return Values(tuple(left), self.nan and not other.nan)

    def within(self, other: Values) -> bool:
        """Whether every one of these is one of `other`'s."""
        return (other.nan or not self.nan) and all(
            any(c <= a and b <= d for c, d in other.intervals) for a, b in self.intervals
        )

    def wrapped(self, dtype: torch.dtype) -> Values:
        """These, or everything that `dtype` can hold where it cannot hold them all."""
        return self if self.within(everything := Values.of_dtype(dtype)) else everything

    def __str__(self) -> str:
        parts = [f"{{{_text(a)}}}" if a == b else f"[{_text(a)}, {_text(b)}]" for a, b in self.intervals]
        return " or ".join(parts + ["NaN"] * self.nan) or "nothing"


def _tidy(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Ascending, touching ones merged; beyond the limit those with the least gaps merge too."""
    if len(intervals) == 1:
        ((low, high),) = intervals
        return ((low + 0, high + 0),)
    merged: list[Interval] = []
    for low, high in sorted((low + 0, high + 0) for low, high in intervals):  # -0.0 + 0 is 0.0
        if merged and low <= merged[-1][1] + (isinstance(low, int) and isinstance(merged[-1][1], int)):
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    while len(merged) > _MOST_INTERVALS:
        gaps = [after[0] - before[1] for before, after in pairwise(merged)]
        least = gaps.index(min(gaps))
        merged[least : least + 2] = [(merged[least][0], merged[least + 1][1])]
    return tuple(merged)


def _cut(interval: Interval, low: Number, high: Number) -> list[Interval]:
    """What remains of `interval` without [low, high]."""
    if high < interval[0] or interval[1] < low:
        return [interval]
    return [
        *([(interval[0], before(low))] if interval[0] < low else []),
        *([(after(high), interval[1])] if high < interval[1] else []),
    ]


def before(number: Number) -> Number:
    """The greatest int, or double, below `number`."""
    return number - 1 if isinstance(number, int) else math.nextafter(number, -math.inf)


def after(number: Number) -> Number:
    return number + 1 if isinstance(number, int) else math.nextafter(number, math.inf)


@cache
def _everything(dtype: torch.dtype) -> Values:
    if dtype == torch.bool:
        return Values(((0, 1),))
    if dtype.is_floating_point or dtype.is_complex:
        return Values(((-math.inf, math.inf),), nan=True)
    limits = torch.iinfo(dtype)
    return Values(((limits.min, limits.max),))


def _text(number: Number) -> str:
    return str(number) if isinstance(number, int) else f"{number:.9g}"
