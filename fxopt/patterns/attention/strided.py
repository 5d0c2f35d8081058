"""Tensors as regular steps through others: which heads, rows and channels stand where, through views and copies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.patterns.cats import Join
from fxopt.patterns.constants import constant_of
from fxopt.shape.sizes import Size, product, same, shape_of, static, tensor_of
from fxopt.shape.view_operators import EXPANSIONS, through
from fxopt.shape.view_steps import Select, Slice, Step, moved

aten = torch.ops.aten


@dataclass(frozen=True)
class Factor:
    """`size` steps of `step` along a dim (-1: nowhere) of the base."""

    size: Size
    dim: int
    step: int

    def split(self, outer: int) -> tuple[Factor, Factor]:
        """The same indices as `outer` times as many as are left."""
        inner = (static(self.size) or 0) // outer
        return Factor(outer, self.dim, self.step * inner), Factor(inner, self.dim, self.step)


Axes = tuple[tuple[Factor, ...], ...]  # of each axis the factors, outermost first


@dataclass(frozen=True)
class Strided:
    """`scale` times what lies in `base`, from `starts` (dim, index) on."""

    base: Node
    axes: Axes
    starts: tuple[tuple[int, int], ...] = ()
    scale: float = 1.0

    @classmethod
    def of(cls, node: Node) -> Strided:
        """The node by itself."""
        axes = (() if static(size) == 1 else (Factor(size, dim, 1),) for dim, size in enumerate(shape_of(node)))
        return cls(node, tuple(axes))

    def after(self, step: Step | None) -> Strided | None:
        """What a view operator makes of it; None where that has no regular steps."""
        match step:
            case Slice(dim, start, size):
                return self._cut(dim, start, size)
            case Select(dim, index):
                return self._selected(dim, index)
        axes = moved(self.axes, step, Factor.split, lambda size: (Factor(size, -1, 0),))
        return None if axes is None else replace(self, axes=axes)

    def _cut(self, dim: int, start: int, size: Size) -> Strided | None:
        """`size` indices of an axis from `start` on."""
        axis = self.axes[dim]
        if same(product(factor.size for factor in axis), size):
            return self
        if len(axis) != 1 or axis[0].dim < 0 or static(size) is None:
            return None
        (factor,) = axis
        cut = () if static(size) == 1 else (replace(factor, size=size),)
        axes = (*self.axes[:dim], cut, *self.axes[dim + 1 :])
        return replace(self, axes=axes)._from(factor.dim, start * factor.step)

    def _selected(self, dim: int, index: int) -> Strided | None:
        found, axis = self, self.axes[dim]
        for factor in reversed(axis):
            size = static(factor.size)
            if size is None and len(axis) > 1:
                return None
            at, index = (index % size, index // size) if size else (index, 0)
            found = found._from(factor.dim, at * factor.step)
        return replace(found, axes=self.axes[:dim] + self.axes[dim + 1 :])

    def _from(self, dim: int, start: int) -> Strided:
        """The same steps, further along a dim."""
        if start == 0 or dim < 0:
            return self
        known = dict(self.starts)
        known[dim] = known.get(dim, 0) + start
        return replace(self, starts=tuple(sorted(known.items())))


def strided(node: Node) -> Strided:
    """The node as steps through the first tensor that is no view, copy or arrangement of another."""
    return _strided(node) or Strided.of(node)


def _strided(node: Node) -> Strided | None:
    if node.op != "call_function" or tensor_of(node) is None:
        return None
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return _scaled(node)
    if (join := Join.of(node)) is not None:
        return _joined(join)
    source, step = through(node, EXPANSIONS) or (None, None)
    return None if source is None else strided(source).after(step)


def _joined(join: Join) -> Strided | None:
    """Pieces of one tensor that lie at regular distances, side by side along an axis, or along a new one."""
    parts = [strided(part) for part in join.inputs]
    first, second = parts[0], parts[1] if len(parts) > 1 else None
    if second is None or any(
        (part.base, part.axes, part.scale) != (first.base, first.axes, first.scale) for part in parts
    ):
        return None
    starts = [dict(part.starts) for part in parts]
    moved = [dim for dim in {*starts[0], *starts[1]} if starts[0].get(dim, 0) != starts[1].get(dim, 0)]
    if len(moved) != 1:
        return None
    (dim,) = moved
    begin, step = starts[0].get(dim, 0), starts[1].get(dim, 0) - starts[0].get(dim, 0)
    regular = [{**starts[0], dim: begin + number * step} for number in range(len(parts))]
    if step <= 0 or [_nonzero(start) for start in starts] != [_nonzero(start) for start in regular]:
        return None
    joined, at = Factor(len(parts), dim, step), join.dim
    if join.is_stack:
        return replace(first, axes=(*first.axes[:at], (joined,), *first.axes[at:]))
    return replace(first, axes=(*first.axes[:at], (joined, *first.axes[at]), *first.axes[at + 1 :]))


def _nonzero(starts: dict[int, int]) -> dict[int, int]:
    return {dim: start for dim, start in starts.items() if start}


def _scaled(node: Node) -> Strided | None:
    left, right = node.args[:2]
    if node.kwargs or len(node.args) != 2:
        return None
    if not isinstance(left, Node) and node.target is aten.mul.Tensor:
        left, right = right, left
    number = constant_of(right)
    if (
        number is None
        or not isinstance(left, Node)
        or (node.target in (aten.div.Tensor, aten.div.Scalar) and not number)
    ):
        return None
    if tensor_of(left) is None or left.meta["val"].dtype != node.meta["val"].dtype:
        return None
    inner = strided(left)
    factor = number if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / number
    return replace(inner, scale=inner.scale * factor)
