"""Arithmetic on sets of values, as tensors of a dtype do it.

Integers: torch.utils._sympy.value_ranges is the interval algebra; what leaves the dtype wraps around, so it becomes
everything. Floats: rounding is monotone, so that the ends, computed in the dtype itself, bound what lies between.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fxopt.shape.values import Number, Values

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


def cast(values: Values, dtype: torch.dtype) -> Values:
    """`values` converted to `dtype`; what torch leaves undefined, or wraps, becomes everything."""
    everything = Values.of_dtype(dtype)
    if dtype == torch.bool:
        kept = [1] if values.nan or any(low or high for low, high in values.intervals) else []
        return Values.only(*kept, *([0] if 0 in values else []))
    if dtype.is_complex:
        return everything
    if dtype.is_floating_point:
        return Values(tuple((rounded(a, dtype), rounded(b, dtype)) for a, b in values.intervals), values.nan)
    if values.nan or any(math.isinf(end) for interval in values.intervals for end in interval):
        return everything
    whole = Values(tuple((math.trunc(low), math.trunc(high)) for low, high in values.intervals))
    return whole if whole.within(everything) else everything


def rounded(number: Number, dtype: torch.dtype) -> float:
    """`number` as `dtype` holds it, to the nearest."""
    if dtype == torch.float64:
        return float(number)
    if dtype in _NUMPY:
        with np.errstate(over="ignore"):
            return float(_NUMPY[dtype](number))
    return torch.tensor(float(number), dtype=torch.float64, device="cpu").to(dtype).item()
