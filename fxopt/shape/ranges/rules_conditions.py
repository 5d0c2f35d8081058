"""Value ranges of bool tensors: comparisons, logic, isnan, any and all. 1 is True."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from fxopt.shape.ranges.algebra import cast
from fxopt.shape.ranges.conditions import SYMBOLS, Comparison, decide, same_value
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Values

aten = torch.ops.aten


def _compare(op: Operation) -> Known | None:
    comparison = Comparison.of(op.node)
    if comparison is None:
        return None
    sides = [op.ranges.of_value(side) for side in (comparison.left, comparison.right)]
    left, right = (cast(side.values, comparison.dtype) for side in sides)
    answer = decide(comparison.symbol, left, right)
    if answer is None and same_value(comparison.left, comparison.right, op.ranges) and not left.nan:
        answer = comparison.symbol in ("==", "<=", ">=")
    if answer is None:
        return None
    first = f"{sides[0].values} ({sides[0].because})" if sides[0].because else f"{sides[0].values}"
    return Known(Values.only(int(answer)), f"{first} {comparison.symbol} {sides[1].values} is always {answer}")


def _truths(values: Values) -> set[bool]:
    return {bool(low) for low, _ in cast(values, torch.bool).intervals} | {
        bool(high) for _, high in cast(values, torch.bool).intervals
    }


def _logic(function: Callable[..., bool], *names: str) -> Rule:
    """Every combination of what the arguments can be."""

    def rule(op: Operation) -> Known | None:
        known = [op.known(name) for name in names]
        combined: set[tuple[bool, ...]] = {()}
        for one in known:
            combined = {(*before, truth) for before in combined for truth in _truths(one.values)}
        texts = dict.fromkeys(one.because for one in known if one.because)
        return Known(Values.only(*(int(function(*case)) for case in combined)), "; ".join(texts))

    return rule


def _kind(numbers: Values) -> Rule:
    """Whether an element is one of `numbers`: isnan, isinf."""

    def rule(op: Operation) -> Known | None:
        source = op.known("self")
        if not source.values:
            return None
        if source.values.within(numbers):
            return Known(Values.only(1), source.because)
        if not source.values & numbers:
            return Known(Values.only(0), source.because)
        return None

    return rule


def _isin(op: Operation) -> Known | None:
    """Only where elements and tested ones have one dtype: a number wraps around into it."""
    if not isinstance(op["elements"], Node):
        return None
    elements, dtype = op.known("elements"), op.tensor("elements").dtype
    name = "test_element" if op["test_element"] is not None else "test_elements"
    if isinstance(op[name], Node) and op.tensor(name).dtype != dtype:
        return None
    tested = cast(op.known(name).values, dtype)
    if not elements.values.intervals or elements.values.nan or elements.values & tested:
        return None
    because = f"{elements.values} ({elements.because}) has none of those"
    return Known(Values.only(int(bool(op["invert"]))), because)


def _quantified(empty: int) -> Rule:
    """all (True where there is nothing) and any (False there)."""

    def rule(op: Operation) -> Known | None:
        source = op.known("self")
        truths = _truths(source.values)
        if len(truths) != 1:
            return None
        (truth,) = truths
        if int(truth) != empty and op.size("self", op["dim"]).min < 1:
            return None
        return Known(cast(Values.only(int(truth)), op.dtype or torch.bool), source.because)

    return rule


_INFINITE = Values(((-math.inf, -math.inf), (math.inf, math.inf)))
_LARGEST = torch.finfo(torch.float64).max

RULES: dict[object, Rule] = {
    **dict.fromkeys(SYMBOLS, _compare),
    aten.logical_and: _logic(lambda a, b: a and b, "self", "other"),
    aten.logical_or: _logic(lambda a, b: a or b, "self", "other"),
    aten.logical_xor: _logic(lambda a, b: a != b, "self", "other"),
    aten.logical_not: _logic(lambda a: not a, "self"),
    aten.isnan: _kind(Values((), nan=True)),
    aten.isinf: _kind(_INFINITE),
    aten.isfinite: _kind(Values.between(-_LARGEST, _LARGEST)),
    aten.isin: _isin,
    aten.all: _quantified(empty=1),
    aten.any: _quantified(empty=0),
}
