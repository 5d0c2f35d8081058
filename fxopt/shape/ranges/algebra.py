"""Arithmetic on sets of values, as tensors of a dtype do it.

Integers: torch.utils._sympy.value_ranges is the interval algebra; what leaves the dtype wraps around, so it becomes
everything. Floats: rounding is monotone, so the ends, computed in the dtype itself, bound what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

from fxopt.shape.ranges.values import Interval, Number, Values
from fxopt.torch_internals.symbols import range_of

_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST_PAIRS = 64
MOST = 2**63 - 1  # elements of a tensor, and the greatest int64


@lru_cache(maxsize=1 << 14)
def cast(values: Values, dtype: torch.dtype) -> Values:
    """`values` converted to `dtype`; what torch leaves undefined, or wraps, becomes everything."""
    everything = Values.of_dtype(dtype)
    if dtype == torch.bool:
        kept = [1] if values.nan or any(low or high for low, high in values.intervals) else []
        return Values.only(*kept, *([0] if 0 in values else []))
    if dtype.is_complex or (dtype.is_floating_point and dtype not in _ROUNDED):
        return everything
    if dtype.is_floating_point:
        return Values(tuple((rounded(a, dtype), rounded(b, dtype)) for a, b in values.intervals), values.nan)
    if values.nan or any(math.isinf(end) for interval in values.intervals for end in interval):
        return everything
    return Values(tuple((math.trunc(low), math.trunc(high)) for low, high in values.intervals)).wrapped(dtype)


def rounded(number: Number, dtype: torch.dtype) -> float:
    """`number` as `dtype` holds it, to the nearest; the half types by way of float32, as torch converts."""
    with np.errstate(over="ignore"):
        exact = np.int64(number) if isinstance(number, int) and abs(number) <= MOST else np.float64(number)
        if dtype == torch.bfloat16:
            bits = int(np.float32(exact).view(np.uint32))
            even = bits + 0x7FFF + (bits >> 16 & 1) if bits & 0x7FFFFFFF < 0x7F800000 else bits
            return float(np.uint32(even & 0xFFFF0000).view(np.float32))
        single = np.float64(exact) if dtype == torch.float64 else np.float32(exact)
        return float(np.float16(single) if dtype == torch.float16 else single)


def integers(name: str, left: Values, right: Values, dtype: torch.dtype) -> Values:
    """SymPyValueRangeAnalysis.<name> (add, mul, floordiv...) of each two intervals, in an integer dtype."""
    return Values(tuple(_integers(name, a, b) for a, b in _pairs(left, right))).wrapped(dtype)


@lru_cache(maxsize=1 << 16)
def _integers(name: str, left: Interval, right: Interval) -> Interval:
    found = getattr(SymPyValueRangeAnalysis, name)(ValueRanges(*left), ValueRanges(*right))
    return int(found.lower), int(found.upper)


def floats(function: Callable[[Any, Any], Any], left: Values, right: Values, dtype: torch.dtype) -> Values | None:
    """function(left, right) where it is monotone in each argument, computed in float32 or float64 at the ends.

    NaN that comes from the ends (inf - inf) is noticed; NaN from within an interval (0 * inf) is the caller's. Where an
    infinite end gives NaN, the numbers before it may give 0: 0 * inf, inf / inf.
    """
    if dtype not in _NUMPY:
        return None
    number = _NUMPY[dtype]
    intervals, nan = [], left.nan or right.nan
    with np.errstate(all="ignore"):
        for first, second in _pairs(left, right):
            ends = [float(function(number(a), number(b))) for a, b in product(first, second)]
            nan |= any(end != end for end in ends)
            intervals.append(_around(0.0 if end != end else end for end in ends))
    return Values(tuple(found for interval in intervals for found in interval), nan)


def _around(ends: Iterable[float]) -> list[Interval]:
    """The interval of some ends. Subnormal ones reach to zero, since a machine may flush them."""
    found = list(ends)
    if not found:
        return []
    low, high = min(found), max(found)
    tiny = torch.finfo(torch.float32).tiny
    return [(0.0 if 0 < low < tiny else low, 0.0 if -tiny < high < 0 else high)]


def mapped(function: Callable[[Any], Any], values: Values, dtype: torch.dtype) -> Values:
    """An increasing function, exact on both ends and without NaN of its own; it wraps where it leaves the dtype."""
    number = float if dtype.is_floating_point else int  # numpy's functions give numpy's numbers
    ends = tuple((number(function(low)), number(function(high))) for low, high in values.intervals)
    return Values(ends, values.nan).wrapped(dtype)


def _pairs(left: Values, right: Values) -> Iterable[tuple[Interval, Interval]]:
    """All pairs of intervals; of the hulls where those were too many."""
    if len(left.intervals) * len(right.intervals) > _MOST_PAIRS:
        left, right = left.hull, right.hull
    return product(left.intervals, right.intervals)


def size_values(size: int | torch.SymInt) -> Values:
    """What a size can be, by the shape environment."""
    if isinstance(size, int):
        return Values.only(size)
    found = range_of(size)
    low, high = (_clipped(end) for end in (found.lower, found.upper))
    return Values.between(low, high)


def _clipped(end: Any) -> int:
    """A bound of a size; infinity is the greatest int64, since no tensor has more elements."""
    if not end.is_Integer:
        return MOST if end > 0 else -MOST - 1
    return max(-MOST - 1, min(MOST, int(end)))
