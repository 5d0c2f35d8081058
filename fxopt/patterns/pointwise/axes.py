"""Along which axis each dim of each tensor of a group runs: broadcasting makes axes one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from fxopt.patterns import views_of
from fxopt.shape.sizes import Size, same, shape_of, static, tensor_of
from fxopt.shape.views import View

_EXPANSIONS = {torch.ops.aten.expand.default, torch.ops.aten.expand_as.default}
Dims = tuple[int | None, ...]  # by dim its axis; None where it is constant


class Mismatch(Exception):
    """Two dims that cannot run along one axis."""


class Axes:
    """Sets of axes that are one (union-find), each with its size."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[Size] = []

    def copy(self) -> Axes:
        twin = Axes()
        twin._parent, twin._sizes = list(self._parent), list(self._sizes)
        return twin

    def of(self, shape: Iterable[Size]) -> Dims:
        """New axes for a tensor of this shape."""
        return tuple(None if static(size) == 1 else self._new(size) for size in shape)

    def _new(self, size: Size) -> int:
        self._parent.append(len(self._parent))
        self._sizes.append(size)
        return len(self._parent) - 1

    def root(self, axis: int) -> int:
        while self._parent[axis] != axis:
            axis = self._parent[axis]
        return axis

    def roots(self, dims: Dims) -> Dims:
        return tuple(None if axis is None else self.root(axis) for axis in dims)

    def size(self, axis: int) -> Size:
        return self._sizes[self.root(axis)]

    def join(self, left: int | None, right: int | None) -> int | None:
        """The one axis of two dims that are broadcast together."""
        if left is None or right is None:
            return right if left is None else left
        left, right = self.root(left), self.root(right)
        if left == right:
            return left
        if not same(self._sizes[left], self._sizes[right]):
            raise Mismatch
        self._parent[max(left, right)] = min(left, right)
        return min(left, right)

    def broadcast(self, shape: Sequence[Size], operands: Iterable[Dims]) -> Dims:
        """The dims of a result of this shape."""
        result: list[int | None] = [None] * len(shape)
        for dims in operands:
            start = len(shape) - len(dims)
            if start < 0:
                raise Mismatch
            for at, axis in enumerate(dims, start):
                result[at] = self.join(result[at], axis)
        for axis, size in zip(result, shape, strict=True):
            if not (static(size) == 1 if axis is None else same(self.size(axis), size)):
                raise Mismatch  # expanded, and nothing here has this axis
        return tuple(result)


def behind(node: Node) -> tuple[Node, Dims]:
    """(the tensor whose elements a chain of views shows, by dim of the view the dim of that tensor).

    Only views that show every element and change nothing but the order, the number of dims of size 1, and expansion.
    """
    base, dims = node, tuple(range(len(shape_of(node))))
    while (found := _step(base)) is not None:
        base, inner = found
        dims = tuple(None if dim is None else inner[dim] for dim in dims)  # type: ignore[misc]
    return base, dims


def expanded(node: Node, dims: Dims) -> bool:
    """Whether a dim is constant although its size is not 1."""
    return any(axis is None and static(size) != 1 for axis, size in zip(dims, shape_of(node), strict=True))


def _expanded(node: Node) -> tuple[Node, Dims]:
    source: Node = node.args[0]  # type: ignore[assignment]
    sizes = shape_of(source)
    added = len(shape_of(node)) - len(sizes)
    return source, (*(None,) * added, *(None if static(size) == 1 else dim for dim, size in enumerate(sizes)))


def _step(node: Node) -> tuple[Node, Dims] | None:
    if tensor_of(node) is None or node.op != "call_function":
        return None
    if node.target in _EXPANSIONS:
        return _expanded(node)
    viewed = views_of.through(node)
    if viewed is None or tensor_of(viewed[0]) is None:
        return None
    source, change = viewed
    shape = shape_of(source)
    view = change(View.of(shape))
    if view is None or any(static(shape[dim]) != 1 for dim, _ in view.fixed):
        return None
    dims: list[int | None] = []
    for axis in view.axes:
        parts = [part for part in axis.parts if static(part.size) != 1]
        if len(parts) > 1 or any(part.start or not part.whole for part in axis.parts):
            return None
        dims.append(parts[0].dim if parts else None)
    shown = {dim for dim in dims if dim is not None}
    whole = all(static(size) == 1 or dim in shown for dim, size in enumerate(shape))
    return (source, tuple(dims)) if whole and source.meta["val"].dtype == node.meta["val"].dtype else None
