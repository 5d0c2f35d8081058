"""View operators as data: what a node of a graph does to the axes of the tensor that it views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from fxopt.shape.sizes import Size, is_tensor, shape_of, static
from fxopt.shape.view_steps import Contiguous, Expand, Permute, Reshape, Select, Slice, Step, Unsqueeze
from fxopt.shape.views import View

aten = torch.ops.aten

RESHAPES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.view_as.default, aten.reshape_as.default, aten._unsafe_view.default,
}  # fmt: skip
REGROUPS = RESHAPES | {aten.unsqueeze.default}  # dims of the same elements in the same order
CASTS = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default,
}  # fmt: skip
COPIES = {aten.clone.default, aten.lift_fresh_copy.default}
SAME = COPIES | {aten.contiguous.default, aten.alias.default}
SPLITS = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default,
}  # fmt: skip
CUTS = {*SPLITS, aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.unbind.int}
EXPANSIONS = {aten.expand.default, aten.expand_as.default}
# Copies, of dims of size 1 in all the cases that are followed.
REPEATS = EXPANSIONS | {aten.repeat.default, aten.repeat_interleave.self_int}


def through(node: Node, spreads: Collection[Any] = ()) -> tuple[Node, Step | None] | None:
    """(the tensor behind a view, what the view does, None where that is no step); None where a node is no view.

    spreads: the operators that count as expansions: some of EXPANSIONS or REPEATS.
    """
    if node.target is operator.getitem:
        return _piece(node)
    source = node.args[0] if node.args else None
    if not is_tensor(source):
        return None
    if node.target in SAME:
        return source, Contiguous()
    if node.target in RESHAPES:
        return source, Reshape(shape_of(node))
    if node.target in spreads:
        shape = shape_of(node)
        return source, Expand(shape) if len(shape) >= len(shape_of(source)) else None
    if node.target in ORDERS:
        conjugates = node.target in CONJUGATES and node.meta["val"].is_complex()
        order = ORDERS[node.target](len(shape_of(source)), *node.args[1:])
        return source, None if conjugates else Permute(tuple(order))
    read = _READERS.get(node.target)
    return (source, read(node, source, *node.args[1:])) if read else None


def viewed(node: Node, spreads: Collection[Any] = ()) -> tuple[Node, View] | None:
    """(the tensor behind a view, the view of it); None where a node is no plain view of another one."""
    found = through(node, spreads)
    view = View.of(shape_of(found[0])).after(found[1]) if found is not None else None
    return (found[0], view) if found is not None and view is not None else None


def _slice(node: Node, source: Node, dim: int = 0, start: Any = None, stop: Any = None, step: Any = 1) -> Slice | None:
    dim %= len(shape_of(source))
    return _cut(source, dim, start or 0, _reaches_end(stop), shape_of(node)[dim]) if step == 1 else None


def _narrow(node: Node, source: Node, dim: int, start: Any, length: Any) -> Slice | None:
    dim %= len(shape_of(source))
    return _cut(source, dim, start, False, shape_of(node)[dim])


def _cut(source: Node, dim: int, start: Any, to_end: bool, size: Size) -> Slice | None:
    """to_end: whether it says so itself; where the dim's size is known, that decides."""
    known = static(shape_of(source)[dim])
    if not isinstance(start, int) or (start < 0 and known is None):
        return None
    if known is not None:
        start = min(max(0, start + known) if start < 0 else start, known)
        to_end = start + (static(size) or 0) == known
    elif start and not (static(size) is not None or to_end):
        return None
    return Slice(dim, start, size, to_end)


def _reaches_end(stop: object) -> bool:
    return stop is None or (isinstance(stop, int) and stop >= 2**62)


def _select(node: Node, source: Node, dim: int, index: Any) -> Select | None:
    dim %= len(shape_of(source))
    size = static(shape_of(source)[dim])
    if not isinstance(index, int) or (index < 0 and size is None):
        return None
    return Select(dim, index + (size or 0) if index < 0 else index)


def _unsqueeze(node: Node, source: Node, dim: int) -> Unsqueeze:
    return Unsqueeze(dim % len(shape_of(node)))


def _swapped(rank: int, first: int = -2, second: int = -1) -> list[int]:
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _moved(rank: int, source: Any, target: Any) -> list[int]:
    sources, targets = (
        [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)] for dims in (source, target)
    )
    order = [dim for dim in range(rank) if dim not in sources]
    for place, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(place, dim)
    return order


def is_piece(node: Node) -> bool:
    """Whether it is one of several views that a call makes at once: with gradients, torch refuses to edit it."""
    many = node.args[0] if node.target is operator.getitem else None
    return isinstance(many, Node) and many.target in CUTS


def _piece(node: Node) -> tuple[Node, Step | None] | None:
    """getitem of unbind, split or chunk."""
    many, index = node.args
    if not isinstance(many, Node) or not isinstance(index, int) or many.op != "call_function" or not many.args:
        return None
    source: Any = many.args[0]
    if not is_tensor(source):
        return None
    if many.target is aten.unbind.int:
        dim: Any = many.args[1] if len(many.args) > 1 else 0
        return source, _select(many, source, dim, index)
    if many.target not in SPLITS:
        return None
    dim, pieces = split_dim(many), many.meta["val"]
    before = [static(piece.shape[dim]) for piece in pieces[:index]]
    if None in before:
        return None
    size = pieces[index].shape[dim]
    return source, _cut(source, dim, sum(before), index == len(pieces) - 1, size)  # type: ignore[arg-type]


def joined_dim(join: Node) -> int:
    """The dim along which a cat or a stack joins."""
    dim: Any = join.args[1] if len(join.args) > 1 else 0
    return dim % len(shape_of(join))


def split_dim(many: Node) -> int:
    """The dim along which a split or a chunk cuts."""
    source, _, dim = (*many.args, 0)[:3]
    return dim % len(shape_of(source))  # type: ignore[operator, arg-type, return-value]


ORDERS: dict[Any, Callable[..., list[int]]] = {
    aten.permute.default: lambda rank, dims: [dim % rank for dim in dims],
    **dict.fromkeys((aten.transpose.int, aten.swapaxes.default, aten.swapdims.default), _swapped),
    **dict.fromkeys((aten.t.default, aten.mT.default, aten.mH.default, aten.adjoint.default), _swapped),
    aten.numpy_T.default: lambda rank: list(range(rank))[::-1],
    **dict.fromkeys((aten.movedim.int, aten.movedim.intlist), _moved),
}
VIEWS = {*REGROUPS, *(SAME - COPIES), *EXPANSIONS, *ORDERS, *CUTS}
CONJUGATES = {aten.mH.default, aten.adjoint.default}
_READERS: dict[Any, Callable[..., Step | None]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
}
