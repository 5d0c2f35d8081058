"""Value ranges of arithmetic: integers that wrap become everything, floats are rounded as the dtype rounds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fxopt.shape.ranges.algebra import floats, integers, mapped
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Number, Values

aten = torch.ops.aten
_FEW = 1e6  # quotients up to here have an exact remainder in float32, by any library


def _binary(compute: Callable[[Operation, Values, Values], Values | None], symbol: str, reverse: bool = False) -> Rule:
    """A rule for `self symbol other`, both promoted to the output's dtype."""

    def rule(op: Operation) -> Known | None:
        if op.dtype is None or (op["alpha"] not in (None, 1)):
            return None
        left, right = (op.operand(name) for name in (("other", "self") if reverse else ("self", "other")))
        values = compute(op, left.values, right.values)
        if values is None:
            return None
        step = f"{symbol} {right.values}" if len(right.values.intervals) == 1 else symbol
        return left.then(values, step) if left.because else right.then(values, symbol)

    return rule


def _add(op: Operation, left: Values, right: Values) -> Values | None:
    return _either("add", operator.add, op.dtype, left, right)


def _subtract(op: Operation, left: Values, right: Values) -> Values | None:
    negative = Values(tuple((-high, -low) for low, high in right.intervals), right.nan)
    return _either("add", operator.add, op.dtype, left, negative)


def _multiply(op: Operation, left: Values, right: Values) -> Values | None:
    found = _either("mul", operator.mul, op.dtype, left, right)
    if found is None or not _is_float(op):
        return found
    undefined = any(0 in a and (math.inf in b or -math.inf in b) for a, b in ((left, right), (right, left)))
    return Values(found.intervals, found.nan or undefined)


def _either(name: str, function: Callable[[Any, Any], Any], dtype: Any, left: Values, right: Values) -> Values | None:
    if dtype == torch.bool:
        both = [(a, b) for a in (0, 1) for b in (0, 1) if a in left and b in right]
        return Values.only(*(min(1, function(a, b)) for a, b in both))
    return floats(function, left, right, dtype) if dtype.is_floating_point else integers(name, left, right, dtype)


def _is_float(op: Operation) -> bool:
    return op.dtype is not None and op.dtype.is_floating_point


def _divide(op: Operation, left: Values, right: Values) -> Values | None:
    """True division. By a scalar, a GPU multiplies with the reciprocal, which rounds otherwise."""
    mode = op["rounding_mode"]
    if 0 in right or op.dtype is None:
        return None
    if mode is None or (mode == "trunc" and _is_float(op)):
        quotient = floats(operator.truediv, left, right, op.dtype)
        product = floats(lambda a, b: a * (type(b)(1) / b), left, right, op.dtype)
        if quotient is None or product is None:
            return None
        both = quotient | product
        return both if mode is None else mapped(np.trunc, both, op.dtype)
    if _is_float(op):
        return None
    return integers("floordiv", left, right, op.dtype) if mode == "floor" else _truncated(left, right, op.dtype)


def _truncated(left: Values, right: Values, dtype: torch.dtype) -> Values:
    def ends(a: tuple[Number, Number], b: tuple[Number, Number]) -> tuple[int, int]:
        found = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x in a for y in b]
        return int(min(found)), int(max(found))

    return Values(tuple(ends(a, b) for a in left.intervals for b in right.intervals)).wrapped(dtype)


def _floor_divide(op: Operation, left: Values, right: Values) -> Values | None:
    if 0 in right or op.dtype is None or _is_float(op):
        return None
    return integers("floordiv", left, right, op.dtype)


def _remainder(op: Operation) -> Known | None:
    """With the sign of the divisor: [0, d) of a positive one, (d, 0] of a negative one."""
    source, divisor = op.operand("self"), op.operand("other").values
    if op.dtype is None or 0 in divisor or not divisor.intervals or divisor.nan or not source.values:
        return None
    if _is_float(op):
        return _float_remainder(op, source, divisor)
    low = min(0, divisor.min + 1)
    high = max(0, divisor.max - 1)
    least = min(map(abs, (end for interval in divisor.intervals for end in interval)))
    untouched = Values.between(0, least - 1) if divisor.min > 0 else Values.between(1 - least, 0)
    if divisor.min * divisor.max > 0 and source.values.within(untouched):
        return source
    return Known(Values.between(low, high), f"remainder by {_divisor(divisor)}")


def _float_remainder(op: Operation, source: Known, divisor: Values) -> Known | None:
    """A tiny negative number plus the divisor rounds to the divisor, so it is included."""
    if len(divisor.intervals) > 1 or divisor.min <= 0 or op.dtype not in (torch.float32, torch.float64):
        return None
    finite = source.values.intervals and max(abs(source.values.min), abs(source.values.max)) < _FEW * divisor.min
    values = Values(((0.0, divisor.max),), nan=not finite or source.values.nan)
    return Known(values, f"remainder by {_divisor(divisor)}") if finite else None


def _fmod(op: Operation) -> Known | None:
    """With the sign of the number."""
    source, divisor = op.operand("self"), op.operand("other").values
    if op.dtype is None or _is_float(op) or 0 in divisor or not divisor or not source.values:
        return None
    most = max(abs(divisor.min), abs(divisor.max)) - 1
    low = max(-most, min(0, source.values.min))
    high = min(most, max(0, source.values.max))
    least = min(abs(end) for interval in divisor.intervals for end in interval)
    if source.values.within(Values.between(1 - least, least - 1)):
        return source
    return Known(Values.between(low, high), f"fmod by {_divisor(divisor)}")


def _divisor(divisor: Values) -> str:
    return str(divisor if divisor.number is None else divisor.number)


def _unary(compute: Callable[[Operation, Values], Values | None], step: str) -> Rule:
    def rule(op: Operation) -> Known | None:
        source = op.operand("self")
        values = compute(op, source.values) if op.dtype is not None else None
        if values is None:
            return None
        return source if values == source.values else source.then(values, step)

    return rule


def _absolute(op: Operation, values: Values) -> Values | None:
    """The smallest integer has no absolute value and stays."""
    assert op.dtype is not None
    found = [(low, high) if low >= 0 else (-high, -low) for low, high in values.intervals if low >= 0 or high <= 0]
    found += [(0, max(-low, high)) for low, high in values.intervals if low < 0 < high]
    return Values(tuple(found), values.nan).wrapped(op.dtype)


def _negative(op: Operation, values: Values) -> Values | None:
    assert op.dtype is not None
    found = Values(tuple((-high, -low) for low, high in values.intervals), values.nan)
    return found if found.within(Values.of_dtype(op.dtype)) and op.dtype != torch.bool else None


def _sign(op: Operation, values: Values) -> Values | None:
    """Of NaN, 0."""
    below, above = (Values(((-math.inf, -5e-324),)), Values(((5e-324, math.inf),)))
    signs = [(-1, bool(values & below)), (0, 0 in values or values.nan), (1, bool(values & above))]
    number = float if _is_float(op) else int
    return Values.only(*(number(sign) for sign, holds in signs if holds))


def _square(op: Operation, values: Values) -> Values | None:
    folded = _absolute(op, values)
    assert folded is not None and op.dtype is not None
    return _either("mul", operator.mul, op.dtype, folded.hull, folded.hull) if folded.intervals else None


def _rounding(function: Callable[[Any], Any]) -> Callable[[Operation, Values], Values | None]:
    """Floor and the like: exact in every floating dtype, nothing to do for integers."""

    def compute(op: Operation, values: Values) -> Values | None:
        return mapped(function, values, op.dtype) if _is_float(op) and op.dtype is not None else values

    return compute


def _to_nearest(op: Operation, values: Values) -> Values | None:
    return None if op["decimals"] else _rounding(np.rint)(op, values)


RULES: dict[object, Rule] = {
    aten.add: _binary(_add, "plus"),
    **dict.fromkeys((aten.sub, aten.subtract), _binary(_subtract, "minus")),
    aten.rsub: _binary(_subtract, "minus", reverse=True),
    **dict.fromkeys((aten.mul, aten.multiply), _binary(_multiply, "times")),
    **dict.fromkeys((aten.div, aten.divide, aten.true_divide), _binary(_divide, "divided by")),
    aten.floor_divide: _binary(_floor_divide, "divided by"),
    aten.remainder: _remainder,
    aten.fmod: _fmod,
    **dict.fromkeys((aten.abs, aten.absolute), _unary(_absolute, "absolute")),
    **dict.fromkeys((aten.neg, aten.negative), _unary(_negative, "negated")),
    aten.positive: _unary(lambda op, values: values, ""),
    **dict.fromkeys((aten.sign, aten.sgn), _unary(_sign, "sign")),
    aten.square: _unary(_square, "squared"),
    aten.floor: _unary(_rounding(np.floor), "floor"),
    aten.ceil: _unary(_rounding(np.ceil), "ceil"),
    **dict.fromkeys((aten.trunc, aten.fix), _unary(_rounding(np.trunc), "trunc")),
    aten.round: _unary(_to_nearest, "rounded"),
}
