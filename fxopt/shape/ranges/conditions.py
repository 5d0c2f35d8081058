"""Comparisons: when their answer is known, and what a tensor can be where they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxopt.shape.aliases import is_pure
from fxopt.shape.calls import packet_of
from fxopt.shape.ranges.algebra import cast
from fxopt.shape.ranges.operation import Known, Operation
from fxopt.shape.ranges.values import Values, after, before
from fxopt.shape.sizes import is_tensor, same_shape, tensor_of

if TYPE_CHECKING:
    from fxopt.shape.ranges.analysis import Ranges

aten = torch.ops.aten
ANYTHING = Values(((-math.inf, math.inf),), nan=True)
_NUMBERS = Values(((-math.inf, math.inf),))
_NAN = Values((), nan=True)
_DEEPEST = 4  # elementwise steps between a tested value and where it is kept

SYMBOLS = {
    **dict.fromkeys((aten.lt, aten.less), "<"),
    **dict.fromkeys((aten.le, aten.less_equal), "<="),
    **dict.fromkeys((aten.gt, aten.greater), ">"),
    **dict.fromkeys((aten.ge, aten.greater_equal), ">="),
    aten.eq: "==",
    **dict.fromkeys((aten.ne, aten.not_equal), "!="),
}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_NOT = (aten.logical_not, aten.bitwise_not)
_AND = (aten.logical_and, aten.bitwise_and, aten.__and__)
_OR = (aten.logical_or, aten.bitwise_or, aten.__or__)


@dataclass(frozen=True)
class Comparison:
    """left symbol right, both promoted to `dtype` first."""

    left: object
    symbol: str
    right: object
    dtype: torch.dtype

    @classmethod
    def of(cls, node: Node) -> Comparison | None:
        symbol = SYMBOLS.get(packet_of(node))
        if symbol is None:
            return None
        left, right = node.args[:2]
        dtype = torch.result_type(_sample(left), _sample(right))
        return None if dtype.is_complex else cls(left, symbol, right, dtype)

    def seen_from(self, subject: Node, ranges: Ranges) -> Comparison | None:
        """This comparison with `subject` at the left, if it compares `subject`."""
        if same_value(self.left, subject, ranges):
            return self
        if same_value(self.right, subject, ranges):
            return Comparison(self.right, _FLIPPED[self.symbol], self.left, self.dtype)
        return None


def decide(symbol: str, left: Values, right: Values) -> bool | None:
    """Whether every left compares so with every right, or none does."""
    if not left or not right:
        return None
    if symbol in (">", ">="):
        return decide(_FLIPPED[symbol], right, left)
    if symbol == "!=":
        equal = decide("==", left, right)
        return None if equal is None else not equal
    nan, numbers = left.nan or right.nan, bool(left.intervals and right.intervals)
    if not numbers or (symbol == "==" and not (left & right).intervals):
        return False
    if symbol == "==":
        return True if left.number is not None and left.number == right.number else None
    never, always = (left.min >= right.max, left.max < right.min)
    if symbol == "<=":
        never, always = (left.min > right.max, left.max <= right.min)
    return False if never else True if always and not nan else None


def restricted(ranges: Ranges, condition: Node, truth: bool, subject: object) -> Known:
    """What `subject` can be at the positions where `condition` is `truth`."""
    return _Restricted(ranges, condition, truth).of_value(subject)


class _Restricted:
    """Ranges where a condition holds, for a value that is computed elementwise from what the condition tests."""

    def __init__(self, ranges: Ranges, condition: Node, truth: bool) -> None:
        self._ranges, self._condition, self._truth = ranges, condition, truth
        self._depth = 0

    def of_value(self, value: object) -> Known:
        known = self._ranges.of_value(value)
        if not is_tensor(value) or self._ranges.aliases.edited(value):
            return known
        rule = self._ranges.elementwise(value) if self._depth < _DEEPEST else None
        if rule is not None:
            self._depth += 1
            closer = rule(Operation(self, value))  # type: ignore[arg-type]
            self._depth -= 1
            known = known if closer is None else Known(known.values & closer.values, known.because)
        holds = holding(self._ranges, self._condition, self._truth, value)
        return Known(known.values & holds, known.because)


def holding(ranges: Ranges, condition: object, truth: bool, subject: Node) -> Values:
    """What `subject` can be where `condition`, of which it is a part, is `truth`."""
    if not is_tensor(condition) or ranges.aliases.edited(condition):
        return ANYTHING
    packet = packet_of(condition)
    is_bool = condition.meta["val"].dtype == torch.bool
    if is_bool and same_value(condition, subject, ranges):
        return Values.only(int(truth))
    if packet in _NOT and is_bool:
        return holding(ranges, condition.args[0], not truth, subject)
    if packet in (*_AND, *_OR) and is_bool:
        first, second = (holding(ranges, part, truth, subject) for part in condition.args[:2])
        return first & second if truth == (packet in _AND) else first | second
    if packet is aten.isnan:
        tested = same_value(condition.args[0], subject, ranges)
        return (_NAN if truth else _NUMBERS) if tested else ANYTHING
    comparison = Comparison.of(condition)
    if comparison is not None:
        found = comparison.seen_from(subject, ranges)
        return ANYTHING if found is None else _satisfying(ranges, found, truth)
    return _through_view(ranges, condition, truth, subject)


def _through_view(ranges: Ranges, condition: Node, truth: bool, subject: Node) -> Values:
    """mask.view(...) over x.view(...): the mask over x."""
    inner, source = condition.args[0] if condition.args else None, subject.args[0] if subject.args else None
    if not (isinstance(inner, Node) and isinstance(source, Node)) or not same_call(condition, subject):
        return ANYTHING
    if not ranges.moves(condition) or tensor_of(inner) is None or tensor_of(source) is None:
        return ANYTHING
    return holding(ranges, inner, truth, source) if same_shape(inner, source) else ANYTHING


def _satisfying(ranges: Ranges, comparison: Comparison, truth: bool) -> Values:
    """The lefts for which the comparison can be `truth`."""
    assert isinstance(comparison.left, Node)
    dtype = comparison.left.meta["val"].dtype
    right = cast(ranges.of_value(comparison.right).values, comparison.dtype)
    if not right:
        return ANYTHING
    whole = not dtype.is_floating_point and comparison.dtype.is_floating_point
    if whole and not right.within(_whole_numbers(comparison.dtype)):
        return ANYTHING
    if not whole and not _keeps(dtype, comparison.dtype):
        return ANYTHING
    holds = _where_true(comparison.symbol, right) if truth else _where_false(comparison.symbol, right)
    return (
        Values(tuple((_up(low), _down(high)) for low, high in holds.intervals if _up(low) <= _down(high)))
        if whole
        else holds
    )


@cache
def _whole_numbers(dtype: torch.dtype) -> Values:
    """Where integers are exact in a floating dtype, and no other integer is rounded to."""
    most = 2 / torch.finfo(dtype).eps
    return Values.between(1 - most, most - 1)


def _up(number: float) -> float:
    return number if math.isinf(number) else math.ceil(number)


def _down(number: float) -> float:
    return number if math.isinf(number) else math.floor(number)


def _where_true(symbol: str, right: Values) -> Values:
    if symbol == "!=":
        return ANYTHING if right.number is None else ANYTHING.without(right)
    if not right.intervals:
        return Values()
    if symbol == "==":
        return Values(right.intervals)
    return {
        "<": Values.between(-math.inf, before(right.max)),
        "<=": Values.between(-math.inf, right.max),
        ">": Values.between(after(right.min), math.inf),
        ">=": Values.between(right.min, math.inf),
    }[symbol]


def _where_false(symbol: str, right: Values) -> Values:
    """The opposite, and NaN: which is not below, above or equal to anything."""
    if symbol == "!=":
        return _where_true("==", right)
    return ANYTHING if right.nan else _where_true(_NEGATED[symbol], right) | _NAN


def _keeps(dtype: torch.dtype, promoted: torch.dtype) -> bool:
    """Whether promotion leaves every value as it is."""
    if dtype == promoted:
        return True
    if dtype.is_floating_point != promoted.is_floating_point:
        return False
    if dtype.is_floating_point:
        return torch.promote_types(dtype, promoted) == promoted
    return Values.of_dtype(dtype).within(Values.of_dtype(promoted))


def same_value(left: object, right: object, ranges: Ranges) -> bool:
    """Whether two nodes are one value: the same node, or the same operator over the same value."""
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return False
    if any(map(ranges.aliases.edited, (left, right, *left.all_input_nodes))):
        return False
    if left is right:
        return True
    if not left.args or not is_pure(left) or not same_call(left, right):
        return False
    return same_value(left.args[0], right.args[0], ranges)


def same_call(left: Node, right: Node) -> bool:
    """Equal but for the first argument; the texts also tell 1 from 1.0 and 0.0 from -0.0."""
    return (
        left.op == right.op == "call_function"
        and left.target == right.target
        and repr(left.args[1:]) == repr(right.args[1:])
        and repr(left.kwargs) == repr(right.kwargs)
    )


def describe(ranges: Ranges, condition: object) -> str:
    """A condition for the user: "< 0"."""
    comparison = Comparison.of(condition) if isinstance(condition, Node) else None
    if comparison is None:
        return "a mask"
    number = ranges.of_value(comparison.right).values.number
    return f"{comparison.symbol} {'a tensor' if number is None else number}"


def _sample(operand: object) -> Any:
    if not isinstance(operand, Node):
        return operand
    value = operand.meta["val"]
    return 1 if isinstance(value, torch.SymInt) else 1.0 if isinstance(value, torch.SymFloat) else value
