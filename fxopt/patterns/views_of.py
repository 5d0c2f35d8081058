"""View operators as changes of a strided view: slice, select, reshape, transpose and their kin."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from fxopt.shape.sizes import shape_of, static, tensor_of
from fxopt.shape.views import View

aten = torch.ops.aten
Change = Callable[[View], View | None]
Viewed = tuple[Node, Change]

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view_as.default,
    aten.reshape_as.default,
    aten._unsafe_view.default,
    aten.ravel.default,
}
REGROUPS = RESHAPES | {aten.unsqueeze.default}  # dims of the same elements in the same order
CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}
SAME = {
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
}


def through(node: Node) -> Viewed | None:
    """(the tensor behind a view node, how the view changes); None where `node` is not a view we know."""
    if node.target is operator.getitem:
        return _piece(node)
    if not node.args or not isinstance(node.args[0], Node) or tensor_of(node.args[0]) is None:
        return None
    source = node.args[0]
    if node.target in SAME:
        return source, lambda view: view
    if node.target in RESHAPES:
        shape = shape_of(node)
        return source, lambda view: view.reshape(shape)
    change = _CHANGES.get(node.target)
    return (source, change(node)) if change else None


def _dim(node: Node, position: int, rank: int, default: int = 0) -> int:
    dim = node.args[position] if len(node.args) > position else default
    assert isinstance(dim, int)
    return dim % rank if rank else 0


def _slice(node: Node) -> Change:
    source = node.args[0]
    assert isinstance(source, Node)
    dim = _dim(node, 1, len(shape_of(source)))
    start = node.args[2] if len(node.args) > 2 else None
    stop = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return _sliced(source, dim, start or 0, stop, shape_of(node)[dim]) if step == 1 else lambda view: None


def _sliced(source: Node, dim: int, start: object, stop: object, size) -> Change:  # type: ignore[no-untyped-def]
    full = shape_of(source)[dim]
    if not isinstance(start, int):
        return lambda view: None
    known = static(full)
    if start < 0:
        if known is None:
            return lambda view: None
        start = max(0, start + known)
    if known is not None:
        start = min(start, known)
    elif start and not (isinstance(size, int) or _reaches_end(stop)):
        return lambda view: None
    to_end = _reaches_end(stop) if known is None else start + (static(size) or 0) == known
    return lambda view: view.slice(dim, start, size, to_end)


def _reaches_end(stop: object) -> bool:
    return stop is None or (isinstance(stop, int) and stop >= 2**62)


def _narrow(node: Node) -> Change:
    source, start = node.args[0], node.args[2]
    assert isinstance(source, Node)
    dim = _dim(node, 1, len(shape_of(source)))
    return _sliced(source, dim, start, 0, shape_of(node)[dim])


def _select(node: Node) -> Change:
    source, index = node.args[0], node.args[2]
    assert isinstance(source, Node)
    dim = _dim(node, 1, len(shape_of(source)))
    return lambda view: view.select(dim, index) if isinstance(index, int) else None


def _unsqueeze(node: Node) -> Change:
    dim = _dim(node, 1, len(shape_of(node)))
    return lambda view: view.unsqueeze(dim)


def _transpose(node: Node) -> Change:
    rank = len(shape_of(node))
    order = list(range(rank))
    first, second = _dim(node, 1, rank), _dim(node, 2, rank)
    order[first], order[second] = order[second], order[first]
    return lambda view: view.permute(order)


def _t(node: Node) -> Change:
    order = list(reversed(range(len(shape_of(node)))))
    return lambda view: view.permute(order)


def _matrix_transpose(node: Node) -> Change:
    order = list(range(len(shape_of(node))))
    order[-2:] = order[:-3:-1]
    conjugates = node.target is not aten.mT.default and node.meta["val"].is_complex()
    return lambda view: None if conjugates else view.permute(order)


def _movedim(node: Node) -> Change:
    rank = len(shape_of(node))
    source, target = (
        [int(dim) % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])]  # type: ignore[arg-type]
        for dims in node.args[1:3]
    )
    order = [dim for dim in range(rank) if dim not in source]
    for place, dim in sorted(zip(target, source, strict=True)):
        order.insert(place, dim)
    return lambda view: view.permute(order)


def _permute(node: Node) -> Change:
    rank = len(shape_of(node))
    order = [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return lambda view: view.permute(order)


_CHANGES: dict[object, Callable[[Node], Change]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.transpose.int: _transpose,
    aten.swapaxes.default: _transpose,
    aten.swapdims.default: _transpose,
    aten.movedim.int: _movedim,
    aten.movedim.intlist: _movedim,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.mT.default: _matrix_transpose,
    aten.mH.default: _matrix_transpose,
    aten.adjoint.default: _matrix_transpose,
    aten.permute.default: _permute,
}


def _piece(node: Node) -> Viewed | None:
    """getitem of unbind, split or chunk."""
    many, index = node.args
    if not isinstance(many, Node) or not isinstance(index, int) or many.op != "call_function" or not many.args:
        return None
    source = many.args[0]
    if not isinstance(source, Node) or tensor_of(source) is None:
        return None
    rank = len(shape_of(source))
    if many.target is aten.unbind.int:
        dim = _dim(many, 1, rank)
        return source, lambda view: view.select(dim, index)
    if many.target not in SPLITS:
        return None
    dim = _dim(many, 2, rank)
    sizes = [shape[dim] for shape in (piece.shape for piece in many.meta["val"])]
    starts = [static(size) for size in sizes[:index]]
    if any(start is None for start in starts):
        return None
    start = sum(start for start in starts if start is not None)
    return source, _sliced(source, dim, start, None if index == len(sizes) - 1 else 0, sizes[index])


SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}
