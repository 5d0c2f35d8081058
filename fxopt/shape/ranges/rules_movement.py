"""Value ranges through data movement: the elements are those of the sources, and nothing else is computed."""

from __future__ import annotations

import torch

from fxopt.shape.ranges.algebra import cast
from fxopt.shape.ranges.operation import Known, Operation, Rule, either
from fxopt.shape.ranges.values import Values

aten = torch.ops.aten
ZERO = Known(Values.only(0), "")


def _same(op: Operation) -> Known | None:
    """view.dtype reads the bits of another type."""
    return op.known("self") if op.tensor("self").dtype == op.dtype else None


def _cast(op: Operation) -> Known | None:
    source = op.known("self")
    return Known(cast(source.values, op.dtype), source.because) if op.dtype is not None else None


def _all_of(name: str) -> Rule:
    """The union of a list of tensors, each cast to the output's dtype."""

    def rule(op: Operation) -> Known | None:
        if op.dtype is None:
            return None
        found = [Known(cast(known.values, op.dtype), known.because) for known in op.tensors(name)]
        return either(*found) if found else None

    return rule


def _with(*names: str) -> Rule:
    """The union of several arguments, where one is missing without it."""

    def rule(op: Operation) -> Known | None:
        return either(*(op.operand(name) for name in names if op[name] is not None))

    return rule


def _padded(op: Operation) -> Known | None:
    """Reflections and the like pad with the source's own elements."""
    if op["mode"] not in (None, "constant"):
        return op.operand("self")
    return _with_zeros(op) if op["value"] is None else either(op.operand("self"), op.operand("value"))


def _with_zeros(op: Operation) -> Known | None:
    return either(op.operand("self"), Known(cast(ZERO.values, _dtype(op)), ""))


def _dtype(op: Operation) -> torch.dtype:
    assert op.dtype is not None
    return op.dtype


def _filled(number: int) -> Rule:
    def rule(op: Operation) -> Known | None:
        return Known(cast(Values.only(number), _dtype(op)), f"filled with {number}")

    return rule


def _filled_with(name: str) -> Rule:
    def rule(op: Operation) -> Known | None:
        known = op.operand(name)
        return Known(known.values, known.because or f"filled with {known.values}")

    return rule


def _put(op: Operation) -> Known | None:
    return None if op["accumulate"] else either(op.operand("self"), op.operand("values"))


SPLITS = {
    aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind, aten.unsafe_chunk,
    aten.unsafe_split, aten.unsafe_split_with_sizes, aten.hsplit, aten.vsplit, aten.dsplit,
}  # fmt: skip
LISTS = {aten.broadcast_tensors, aten.meshgrid}

MOVES = (
    aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.unsqueeze, aten.squeeze,
    aten.expand, aten.expand_as, aten.broadcast_to, aten.view_as, aten.reshape_as, aten._reshape_alias, aten.permute,
    aten.transpose, aten.t, aten.numpy_T, aten.adjoint, aten.mT, aten.movedim, aten.moveaxis, aten.swapaxes,
    aten.swapdims, aten.contiguous, aten.clone, aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy,
    aten.slice, aten.select, aten.narrow, aten.narrow_copy, aten.diagonal, aten.unfold, aten.flip,
    aten.fliplr, aten.flipud, aten.roll, aten.rot90, aten.repeat, aten.tile, aten.gather, aten.index_select, aten.index,
    aten.take, aten.take_along_dim, aten.masked_select, aten.msort, aten.expand_copy, aten.view_copy, aten.slice_copy,
)  # fmt: skip

CASTS: dict[object, Rule] = dict.fromkeys((aten.to, aten._to_copy, aten.type_as), _cast)

RULES: dict[object, Rule] = {
    **dict.fromkeys(MOVES, _same),
    **dict.fromkeys(
        (aten.cat, aten.concat, aten.concatenate, aten.stack, aten.hstack, aten.vstack, aten.column_stack),
        _all_of("tensors"),
    ),
    aten.embedding: lambda op: op.known("weight"),
    **dict.fromkeys((aten.repeat_interleave.self_Tensor, aten.repeat_interleave.self_int), _same),
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), _padded),
    **dict.fromkeys((aten.tril, aten.triu), _with_zeros),
    **dict.fromkeys((aten.select_scatter, aten.slice_scatter, aten.scatter.src), _with("self", "src")),
    **dict.fromkeys((aten.scatter.value, aten.index_fill), _with("self", "value")),
    aten.index_put: _put,
    **dict.fromkeys((aten.index_copy, aten.masked_scatter), _with("self", "source")),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), _filled(0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), _filled(1)),
    **dict.fromkeys((aten.full, aten.full_like, aten.new_full), _filled_with("fill_value")),
    aten.fill: _filled_with("value"),
    aten.scalar_tensor: _filled_with("s"),
    **dict.fromkeys((aten.item, aten._local_scalar_dense), lambda op: op.known("self")),
}
