"""Value ranges of bounds and substitutions: clamp, minimum, relu, where, masked_fill, nan_to_num."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from fxopt.shape.calls import WHERES
from fxopt.shape.ranges.algebra import cast
from fxopt.shape.ranges.conditions import describe, restricted
from fxopt.shape.ranges.operation import Known, Operation, Rule, either
from fxopt.shape.ranges.values import Number, Values

aten = torch.ops.aten


def _bounded(source: Values, bound: Values, below: bool) -> Values:
    """The smaller (`below`), or the larger, of one of each. NaN where either is."""
    nan = source.nan or bound.nan
    if not source.intervals or not bound.intervals:
        return Values((), nan)
    kept_below, kept_above = Values.between(-math.inf, bound.max), Values.between(bound.min, math.inf)
    kept = source & (kept_below if below else kept_above)
    taken = bound & (Values.between(-math.inf, source.max) if below else Values.between(source.min, math.inf))
    return Values(kept.intervals + taken.intervals, nan)


def _clamp(low: str | Number | None, high: str | Number | None, step: str = "") -> Rule:
    """max with the lower bound, then min with the upper one: arguments, or numbers that the operator itself has."""

    def rule(op: Operation) -> Known | None:
        source = op.operand("self")
        values, limits = source.values, (_limit(op, low), _limit(op, high))
        for limit, below in zip(limits, (False, True), strict=True):
            values = values if limit is None else _bounded(values, limit, below)
        if values == source.values:
            return source
        return Known(values, step or f"clamped to [{_end(limits[0], '-inf')}, {_end(limits[1], 'inf')}]")

    return rule


def _limit(op: Operation, bound: str | Number | None) -> Values | None:
    if isinstance(bound, str):
        return None if op[bound] is None else op.operand(bound).values
    assert op.dtype is not None
    return None if bound is None else cast(Values.only(bound), op.dtype)


def _end(limit: Values | None, unbounded: str) -> str:
    if limit is None:
        return unbounded
    return "a tensor" if limit.number is None else f"{limit.number:.9g}"


def _extreme(below: bool, step: str) -> Rule:
    def rule(op: Operation) -> Known | None:
        source, other = op.operand("self"), op.operand("other")
        values = _bounded(source.values, other.values, below)
        return source if values == source.values else Known(values, f"{step} {other.values}")

    return rule


def _ignoring_nan(below: bool, step: str) -> Rule:
    """fmin and fmax give the other number where one is NaN."""
    plain = _extreme(below, step)

    def rule(op: Operation) -> Known | None:
        source, other = op.operand("self").values, op.operand("other").values
        return None if source.nan or other.nan else plain(op)

    return rule


def _where(mask: str, first: str, second: str) -> Rule:
    """`first` where the mask holds, else `second`: each is what it can be there."""

    def rule(op: Operation) -> Known | None:
        condition, dtype = op[mask], op.dtype
        assert isinstance(condition, Node) and dtype is not None
        found = []
        for name, truth in ((first, True), (second, False)):
            if op.known(mask).values != Values.only(int(not truth)):
                known = restricted(op.ranges, condition, truth, op[name])
                found.append(Known(cast(known.values, dtype), known.because))
        if len(found) == 1:
            return found[0]
        return either(*found).then(found[0].values | found[1].values, f"where({describe(op.ranges, condition)})")

    return rule


def _nan_to_num(op: Operation) -> Known | None:
    source = op.operand("self")
    if op.dtype is None or not op.dtype.is_floating_point:
        return source
    limits = torch.finfo(op.dtype)
    values = source.values & Values.between(limits.min, limits.max)
    for name, number, default in (
        ("nan", math.nan, 0.0),
        ("posinf", math.inf, limits.max),
        ("neginf", -math.inf, limits.min),
    ):
        if number in source.values:
            given = op[name]
            values = values | cast(Values.only(default if given is None else given), op.dtype)  # type: ignore[arg-type]
    return source if values == source.values else source.then(values, "nan_to_num")


ELEMENTWISE: dict[object, Rule] = {
    **dict.fromkeys((aten.clamp, aten.clip), _clamp("min", "max")),
    aten.clamp_min: _clamp("min", None),
    aten.clamp_max: _clamp(None, "max"),
    aten.hardtanh: _clamp("min_val", "max_val"),
    aten.relu: _clamp(0, None, "relu"),
    aten.relu6: _clamp(0, 6, "relu6"),
    **dict.fromkeys((aten.minimum, aten.min.other), _extreme(below=True, step="minimum with")),
    **dict.fromkeys((aten.maximum, aten.max.other), _extreme(below=False, step="maximum with")),
    aten.fmin: _ignoring_nan(below=True, step="minimum with"),
    aten.fmax: _ignoring_nan(below=False, step="maximum with"),
    aten.nan_to_num: _nan_to_num,
}

SUBSTITUTIONS: dict[object, Rule] = {
    **dict.fromkeys((*WHERES, aten.where.Scalar), _where("condition", "self", "other")),
    aten.masked_fill: _where("mask", "value", "self"),
}
