"""Parts of tensors as Python spells them: `x[:, 1:, :8]` is one call where a graph has two, and `x[:, k] = y` too.

On one core `x[:, 1:, :8]` takes 2.0 us and two slices 2.7, `x[:, 1:, :8] = y` 2.9 and the same in three calls 3.5,
`x[ids]` 2.5 and its operator by name 3.2.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from fxopt.shape.sizes import tensor_of

aten = torch.ops.aten
_WHOLE = slice(None)
_SELECTS = (aten.select.int, torch.select)


def indexed(node: Node) -> bool:
    """Makes a call indexing, where that is its shorter way. Whether it did.

    Calls in front of it are as short as they become.
    """
    if node.kwargs:
        return False
    if node.target is aten.slice.Tensor:
        return _cut(node)
    if node.target is aten.select.int:
        return _picked(node)
    if node.target is aten.index.Tensor:
        return _gathered(node)
    return node.target is aten.copy_.default and _written(node)


def _cut(node: Node) -> bool:
    """slice(x, dim, start, stop, step)"""
    arguments: tuple[Any, ...] = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    source, dim, start, stop, step = arguments
    if dim < 0 or isinstance(step, Node):
        return False
    stop = None if isinstance(stop, int) and stop >= 2**62 else stop
    _index(node, source, dim, slice(start, stop, None if step == 1 else step), _cuts(source, node, dim))
    return True


def _picked(node: Node) -> bool:
    """select(x, dim, index) of a part; of a whole tensor it is as short by itself."""
    arguments: tuple[Any, ...] = node.args
    source, dim, index = arguments
    cuts = _cuts(source, node, dim)
    if not isinstance(index, int) or not cuts:
        return False
    _index(node, source, dim, index, cuts)
    return True


def _index(node: Node, source: Any, dim: int, item: int | slice, cuts: tuple[slice, ...]) -> None:
    """x[..., item], together with the `cuts` that made its source."""
    base = source.args[0] if cuts else source
    node.target, node.args = operator.getitem, (base, (*cuts, *(_WHOLE,) * (dim - len(cuts)), item))
    if cuts:
        node.graph.erase_node(source)


def _cuts(part: Any, reader: Node, dim: int) -> tuple[slice, ...]:
    """The index of a part of a tensor that is made right in front of its only reader by slices of dims before `dim`
    alone; () of everything else."""
    index = _place(part, reader) if isinstance(part, Node) and part.target is operator.getitem else None
    alone = index is not None and len(index) <= dim and all(isinstance(item, slice) for item in index)
    return index if alone else ()  # type: ignore[return-value]


def _gathered(node: Node) -> bool:
    """index(x, tensors). A number in a tensor would be read by the host."""
    source, given = node.args
    tensors = [tensor_of(item) for item in given if item is not None]  # type: ignore[union-attr, arg-type]
    if any(tensor is None or not tensor.dim() for tensor in tensors):
        return False
    index = tuple(_WHOLE if item is None else item for item in given)  # type: ignore[union-attr]
    node.target, node.args = operator.getitem, (source, index)
    return True


def _written(node: Node) -> bool:
    """copy_(part, values) whose result nobody reads."""
    part, values = node.args if len(node.args) == 2 else (None, None)
    value = tensor_of(values)
    if node.users or value is None or not value.dim() or not isinstance(part, Node) or values is part:
        return False
    if (index := _place(part, node)) is None:
        return False
    node.target, node.args = operator.setitem, (part.args[0], index, values)
    node.graph.erase_node(part)
    return True


def _place(part: Node, reader: Node) -> tuple[Any, ...] | None:
    """The index of a part of a tensor, a view, that is made right in front of its only reader."""
    if reader.prev is not part or len(part.users) > 1 or part.kwargs:
        return None
    if part.target in _SELECTS:
        _, dim, index = part.args
        return (*(_WHOLE,) * dim, index) if isinstance(index, int) and dim >= 0 else None  # type: ignore[operator]
    index = part.args[1] if part.target is operator.getitem else None
    return index if isinstance(index, tuple) and all(isinstance(item, slice | int) for item in index) else None
