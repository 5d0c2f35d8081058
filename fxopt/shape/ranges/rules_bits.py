"""Value ranges of bit masks and shifts: `i & 255` is in [0, 255] whatever i is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import torch

from fxopt.shape.ranges.algebra import integers, mapped
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Interval, Number, Values

aten = torch.ops.aten
_Ends = Callable[[Interval, Interval], Interval]


def _bits(*numbers: Number) -> int:
    """Bits that hold all of these, their sign aside."""
    return max((n if n >= 0 else ~n).bit_length() for n in map(int, numbers))


def _and(left: Interval, right: Interval) -> Interval:
    plain = [high for low, high in (left, right) if low >= 0]
    if plain:
        return 0, min(plain)
    return -1 << _bits(left[0], right[0]), max(left[1], right[1])


def _or(left: Interval, right: Interval) -> Interval:
    never_negative = left[0] >= 0 and right[0] >= 0
    low = max(left[0], right[0]) if never_negative else min(left[0], right[0])
    negative = left[1] < 0 or right[1] < 0
    return low, -1 if negative else (1 << _bits(left[1], right[1])) - 1


def _xor(left: Interval, right: Interval) -> Interval:
    size = 1 << _bits(*left, *right)
    return 0 if left[0] >= 0 and right[0] >= 0 else -size, size - 1


def _mask(ends: _Ends, exact: Callable[[int, int], int], step: str) -> Rule:
    @lru_cache(maxsize=1 << 14)
    def combine(left: Interval, right: Interval) -> Interval:
        if left[0] == left[1] and right[0] == right[1]:
            return (exact(int(left[0]), int(right[0])),) * 2
        return ends(left, right)

    def rule(op: Operation) -> Known | None:
        if op.dtype is None or op.dtype.is_floating_point:
            return None
        left, right = op.operand("self"), op.operand("other")
        if op.dtype == torch.bool:  # one by one, else [0, 1] hides what is known
            pairs = product(*({int(b) for b in (0, 1) if b in known.values} for known in (left, right)))
            return left.then(Values.only(*(exact(a, b) for a, b in pairs)), step)
        values = Values(tuple(combine(a, b) for a, b in product(left.values.intervals, right.values.intervals)))
        if values == left.values:
            return left
        return Known(values, f"{step} {right.values if right.values.number is not None else left.values}")

    return rule


def _shift(left: bool) -> Rule:
    def rule(op: Operation) -> Known | None:
        source, by = op.operand("self"), op.operand("other").values
        if op.dtype is None or op.dtype.is_floating_point or op.dtype == torch.bool:
            return None
        if not by.intervals or by.min < 0 or by.max >= torch.iinfo(op.dtype).bits:
            return None
        powers = Values(tuple((1 << int(low), 1 << int(high)) for low, high in by.intervals))
        if left:
            return source.then(integers("mul", source.values, powers, op.dtype), f"shifted left by {by}")
        return source.then(integers("floordiv", source.values, powers, op.dtype), f"shifted right by {by}")

    return rule


def _not(op: Operation) -> Known | None:
    source = op.operand("self")
    if op.dtype is None or op.dtype.is_floating_point:
        return None
    if op.dtype == torch.bool:
        return source.then(Values.only(*(1 - b for b in (0, 1) if b in source.values)), "not")
    if not op.dtype.is_signed:
        most = torch.iinfo(op.dtype).max
        flipped = Values(tuple((most - high, most - low) for low, high in source.values.intervals))
        return source.then(flipped, "not")
    flipped = Values(tuple((-high, -low) for low, high in source.values.intervals))
    return source.then(mapped(lambda n: n - 1, flipped, op.dtype), "not")


RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.bitwise_and, aten.__and__), _mask(_and, operator.and_, "and")),
    **dict.fromkeys((aten.bitwise_or, aten.__or__), _mask(_or, operator.or_, "or")),
    **dict.fromkeys((aten.bitwise_xor, aten.__xor__), _mask(_xor, operator.xor, "xor")),
    **dict.fromkeys((aten.bitwise_left_shift, aten.__lshift__), _shift(left=True)),
    **dict.fromkeys((aten.bitwise_right_shift, aten.__rshift__), _shift(left=False)),
    aten.bitwise_not: _not,
}
