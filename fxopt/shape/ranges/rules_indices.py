"""Value ranges of positions, counts and draws: bucketize, argmax, topk, arange, unique, nonzero, one_hot, randint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxopt.shape.ranges.algebra import cast, size_values
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Values

aten = torch.ops.aten
Part = Callable[[Operation], Known | None]
_EXACT = 2**24  # integers up to here are exact in float32


def _search(boundaries: str) -> Rule:
    """[0, edges] in every row; NaN falls behind the last edge."""

    def rule(op: Operation) -> Known | None:
        edges = size_values(op.tensor(boundaries).shape[-1])
        text = "its edges" if edges.number is None else f"{edges.number} edges"
        return _integers(op, Values.between(0, edges.max), f"bucketize over {text}")

    return rule


def _integers(op: Operation, values: Values, because: str) -> Known | None:
    assert op.dtype is not None
    return Known(cast(values, op.dtype), because)


def _position(step: str, dim: str | None = "dim") -> Rule:
    """A position along a dim of `self`; among all elements where no dim is given."""

    def rule(op: Operation) -> Known | None:
        size = op.size("self", op[dim] if dim else None)
        text = step if size.number is None else f"{step} of {size.number}"
        return _integers(op, Values.between(0, max(0, size.max - 1)), text)

    return rule


def _any_position(op: Operation) -> Known | None:
    """Coordinates: below the largest size."""
    sizes = [size_values(size) for size in op.tensor("self").shape]
    most = max((size.max for size in sizes), default=1)
    return _integers(op, Values.between(0, max(0, most - 1)), "positions")


def _where_position(position: int) -> Part:
    def rule(op: Operation) -> Known | None:
        shape = op.tensor("condition").shape
        most = size_values(shape[position]).max if position < len(shape) else 1
        return _integers(op, Values.between(0, max(0, most - 1)), "positions")

    return rule


def _bag(op: Operation) -> Known | None:
    repeats = op.size("repeats")
    return _integers(op, Values.between(0, max(0, repeats.max - 1)), "repeated positions")


def _arange(op: Operation) -> Known | None:
    start = op.known("start").values if op["start"] is not None else Values.only(0)
    end, step = op.known("end").values, op.known("step").values if op["step"] is not None else Values.only(1)
    if op.dtype is None or op.dtype == torch.bool or not step.number:
        return None
    numbers = [n for values in (start, end, step) for n in (values.min, values.max)]
    if not all(isinstance(number, int) for number in numbers):
        return None
    low, high = (start.min, end.max - 1) if step.number > 0 else (end.min + 1, start.max)
    values = Values.between(low, high)
    if op.dtype.is_floating_point and not values.within(Values.between(-_EXACT, _EXACT)):
        return None
    return Known(cast(values, op.dtype), "arange" if end.number is None else f"arange to {end.number}")


def _flags(step: str) -> Rule:
    return lambda op: _integers(op, Values.between(0, 1), step)


def _count(op: Operation) -> Known | None:
    return _integers(op, Values.between(0, op.size("self", op["dim"]).max), "counts")


def _ones_of(op: Operation) -> Known | None:
    """How often something occurs: at least once."""
    return _integers(op, Values.between(1, max(1, op.size("self", op["dim"]).max)), "counts")


def _randint(op: Operation) -> Known | None:
    low = op.known("low").values if op["low"] is not None else Values.only(0)
    high = op.known("high").values
    return _integers(op, Values.between(low.min, high.max - 1), f"randint to {high.max}")


def _element(op: Operation) -> Known | None:
    return op.known("self")


def _typical(op: Operation) -> Known | None:
    """One of the elements; of nothing, torch.median makes up a number."""
    return op.known("self") if op.size("self", op["dim"]).min >= 1 else None


_UNIQUE = (_element, _position("inverse of unique"), _ones_of)
_BY_DIM = (_element, _position("position"))
_TYPICAL = (_typical, _position("position"))

PARTS: dict[object, Sequence[Part]] = {
    **dict.fromkeys((aten.max, aten.min, aten.sort, aten.topk, aten.cummax, aten.cummin), _BY_DIM),
    **dict.fromkeys((aten.kthvalue, aten.median, aten.mode), _TYPICAL),
    aten.aminmax: (_element, _element),
    **dict.fromkeys((aten._unique2, aten.unique_consecutive, aten.unique_dim), _UNIQUE),
    aten.where: [_where_position(position) for position in range(8)],
    aten.nonzero_numpy: [_any_position] * 8,
}
"""What the outputs of an operator with several can be, in their order."""

RULES: dict[object, Rule] = {
    aten.bucketize: _search("boundaries"),
    aten.searchsorted: _search("sorted_sequence"),
    **{getattr(aten, name): _position(name) for name in ("argmax", "argmin", "argsort")},
    **dict.fromkeys((aten.nonzero, aten.argwhere), _any_position),
    aten.repeat_interleave.Tensor: _bag,
    aten.multinomial: _position("multinomial", None),
    aten.arange: _arange,
    **{getattr(aten, name): _flags(name) for name in ("one_hot", "bernoulli")},
    aten.bincount: lambda op: _count(op) if op["weights"] is None else None,
    aten.count_nonzero: _count,
    aten.randint: _randint,
    **dict.fromkeys((aten.max.default, aten.min.default, aten.amax, aten.amin), _element),
    aten.median.default: _typical,
}
