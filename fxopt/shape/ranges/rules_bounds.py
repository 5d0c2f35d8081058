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


def _clamp(low: str | None, high: str | None) -> Rule:
    """max with the lower bound, then min with the upper one."""

    def rule(op: Operation) -> Known | None:
        source = op.operand("self")
        values = source.values
        for name, below in ((low, False), (high, True)):
            if name is not None and op[name] is not None:
                values = _bounded(values, op.operand(name).values, below)
        if values == source.values:
            return source
        return Known(values, f"clamped to [{_end(op, low, '-inf')}, {_end(op, high, 'inf')}]")

    return rule


def _end(op: Operation, name: str | None, unbounded: str) -> str:
    if name is None or op[name] is None:
        return unbounded
    number = op.operand(name).values.number
    return "a tensor" if number is None else f"{number:.9g}"


def _constants(low: Number | None, high: Number | None) -> Rule:
    """Bounds that the operator itself has: relu, relu6."""

    def rule(op: Operation) -> Known | None:
        source = op.operand("self")
        values = source.values
        assert op.dtype is not None
        for bound, below in ((low, False), (high, True)):
            if bound is not None:
                values = _bounded(values, cast(Values.only(bound), op.dtype), below)
        return source if values == source.values else Known(values, "relu" if high is None else f"relu{high}")

    return rule


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
    aten.relu: _constants(0, None),
    aten.relu6: _constants(0, 6),
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
