"""Along which axis each dim of each tensor of a group runs: broadcasting makes axes one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from fxopt.shape.sizes import Size, same, shape_of, static
from fxopt.shape.view_operators import EXPANSIONS, viewed

Dims = tuple[int | None, ...]  # by dim its axis; None where it is constant: of size 1, or expanded


class Mismatch(Exception):
    """Two dims that cannot run along one axis."""


class Constant(Mismatch):
    """A dim that others were taken to have an axis in, and that turns out to be constant."""


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
        """The dims of a result of this shape; constant where those of all operands are."""
        result: list[int | None] = [None] * len(shape)
        for dims in operands:
            start = len(shape) - len(dims)
            if start < 0:
                raise Mismatch
            for at, axis in enumerate(dims, start):
                result[at] = self.join(result[at], axis)
        for axis, size in zip(result, shape, strict=True):
            if axis is not None and not same(self.size(axis), size):
                raise Mismatch
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


def expanded(node: Node, dims: Dims) -> set[int]:
    """Which dims are constant although their size is not 1."""
    sizes = zip(dims, shape_of(node), strict=True)
    return {dim for dim, (axis, size) in enumerate(sizes) if axis is None and static(size) != 1}


def _step(node: Node) -> tuple[Node, Dims] | None:
    source, view = viewed(node, EXPANSIONS) or (node, None)
    dims = view.whole_dims(shape_of(source)) if view is not None else None
    return (source, dims) if dims is not None and source.meta["val"].dtype == node.meta["val"].dtype else None
