"""Value ranges of sums, means and of functions with a known range."""

from __future__ import annotations

import math

import torch

from fxopt.shape.ranges.algebra import integers
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Values

aten = torch.ops.aten
_ROOT_ERROR = 1e-6  # eight ulps of float32
NON_NEGATIVE = Values.between(0.0, math.inf)


def _sum(op: Operation) -> Known | None:
    count = op.size("self", op["dim"])
    return _added(op, count, f"sum of at most {count.max}")


def _cumulative(op: Operation) -> Known | None:
    """Sums of one to n elements."""
    return _added(op, Values.between(1, max(1, op.size("self", op["dim"]).max)), "cumulative sum")


def _added(op: Operation, count: Values, step: str) -> Known | None:
    """n elements between n * low and n * high. Floats round on the way: only their sign is kept."""
    source = op.operand("self")
    if op.dtype is None or not source.values.intervals:
        return None
    if op.dtype.is_floating_point:
        return source.then(NON_NEGATIVE, "summed") if source.values.within(NON_NEGATIVE) else None
    return source.then(integers("mul", source.values.hull, count, op.dtype), step)


def _mean(op: Operation) -> Known | None:
    """Of nothing: NaN."""
    source = op.operand("self")
    if not source.values.intervals or not source.values.within(NON_NEGATIVE):
        return None
    return source.then(Values(NON_NEGATIVE.intervals, nan=True), "mean")


def _range(low: float, high: float, step: str) -> Rule:
    """Of a function that is in [low, high] whatever it is given, NaN aside."""

    def rule(op: Operation) -> Known | None:
        source = op.operand("self")
        return Known(Values(((low, high),), source.values.nan), step)

    return rule


def _softmax(op: Operation) -> Known | None:
    """NaN where a row has an infinity."""
    return Known(Values(((0.0, 1.0),), nan=True), "softmax")


def _root(op: Operation) -> Known | None:
    """Of negative numbers NaN. Vector libraries (MKL) round a root by another ulp now and then."""
    source = op.operand("self")
    positive = source.values & NON_NEGATIVE
    if op.dtype not in (torch.float32, torch.float64) or not positive.intervals:
        return None
    low, high = math.sqrt(positive.min) * (1 - _ROOT_ERROR), math.sqrt(positive.max) * (1 + _ROOT_ERROR)
    return source.then(Values(((low, high),), source.values.nan or source.values.min < 0), "square root")


RULES: dict[object, Rule] = {
    aten.sum: _sum,
    aten.cumsum: _cumulative,
    aten.mean: _mean,
    aten.sigmoid: _range(0.0, 1.0, "sigmoid"),
    aten.exp: _range(0.0, math.inf, "exp"),
    **dict.fromkeys((aten.softmax, aten._softmax), _softmax),
    aten.sqrt: _root,
}
