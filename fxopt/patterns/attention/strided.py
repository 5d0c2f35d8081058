"""Tensors as regular steps through others: which heads, rows and channels stand where, through views and copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.shape.sizes import Size, expression, product, same, shape_of, static, tensor_of
from fxopt.shape.view_operators import REGROUPS, SAME

aten = torch.ops.aten


@dataclass(frozen=True)
class Factor:
    """`size` steps of `step` along a dim (-1: nowhere) of the base."""

    size: Size
    dim: int
    step: int


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
        return cls(node, tuple(_axis(size, dim) for dim, size in enumerate(shape_of(node))))

    def moved(self, dim: int, start: int) -> Strided:
        if start == 0:
            return self
        known = dict(self.starts)
        known[dim] = known.get(dim, 0) + start
        return replace(self, starts=tuple(sorted(known.items())))


def _axis(size: Size, dim: int) -> tuple[Factor, ...]:
    return () if static(size) == 1 else (Factor(size, dim, 1),)


def strided(node: Node) -> Strided:
    """The node as steps through the first tensor that is no view, copy or arrangement of another."""
    return _strided(node) or Strided.of(node)


def _strided(node: Node) -> Strided | None:
    if node.op != "call_function" or tensor_of(node) is None:
        return None
    if node.target is operator.getitem:
        return _piece(node)
    if node.target in (aten.stack.default, aten.cat.default):
        return _joined(node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return _scaled(node)
    if not node.args or not isinstance(node.args[0], Node) or tensor_of(node.args[0]) is None:
        return None
    inner = strided(node.args[0])
    if node.target in SAME:
        return inner
    if node.target in REGROUPS:
        axes = regrouped(inner.axes, shape_of(node))
    elif node.target is aten.slice.Tensor:
        return _sliced(node, inner)
    elif node.target is aten.select.int:
        return _selected(inner, int(node.args[1]) % len(inner.axes), int(node.args[2]), shape_of(node.args[0]))  # type: ignore[arg-type]
    else:
        axes = reordered(node, inner.axes)
    return None if axes is None else replace(inner, axes=axes)


def reordered(node: Node, axes: Axes) -> Axes | None:
    """The axes behind a permutation or an expansion."""
    if node.target is aten.permute.default:
        return tuple(axes[dim % len(axes)] for dim in node.args[1])  # type: ignore[union-attr, operator, index]
    pair: Any = {aten.t.default: (-2, -1), aten.mT.default: (-2, -1), aten.numpy_T.default: (-2, -1)}.get(node.target)  # type: ignore[call-overload]
    if node.target is aten.transpose.int:
        pair = node.args[1:3]
    if pair is not None and len(axes) >= 2 and (node.target is not aten.numpy_T.default or len(axes) == 2):
        left, right = (dim % len(axes) for dim in pair)
        swapped = list(axes)
        swapped[left], swapped[right] = axes[right], axes[left]
        return tuple(swapped)
    if node.target is aten.expand.default:
        shape = shape_of(node)
        padded = ((),) * (len(shape) - len(axes)) + axes
        return tuple(
            axis or (() if static(size) == 1 else (Factor(size, -1, 0),))
            for axis, size in zip(padded, shape, strict=True)
        )
    return None


def regrouped(axes: Axes, shape: Sequence[Size]) -> Axes | None:
    """The same factors in their order under new axes; one is split where a new axis ends inside of it."""
    left = [factor for axis in axes for factor in axis]
    result: list[tuple[Factor, ...]] = []
    for size in shape:
        taken: list[Factor] = []
        while static(size) != 1 and not same(product(factor.size for factor in taken), size):
            if not left:
                return None
            factor, needed = left.pop(0), _quotient(size, taken)
            whole = static(factor.size)
            if needed is not None and whole is not None and needed < whole:
                if needed < 1 or whole % needed:
                    return None
                inner = whole // needed
                left.insert(0, Factor(inner, factor.dim, factor.step))
                factor = Factor(needed, factor.dim, factor.step * inner)
            taken.append(factor)
        result.append(tuple(taken))
    return None if left else tuple(result)


def _quotient(size: Size, taken: Sequence[Factor]) -> int | None:
    """How often what was taken fits into a size, where that is a number."""
    ratio = sympy.cancel(expression(size) / expression(product(factor.size for factor in taken)))
    return int(ratio) if ratio.is_Integer else None


def _cut(inner: Strided, dim: int, start: int, size: Size) -> Strided | None:
    """`size` indices of an axis from `start` on."""
    axis = inner.axes[dim]
    if len(axis) != 1 or axis[0].dim < 0:
        return None
    (factor,) = axis
    cut = () if static(size) == 1 else (Factor(size, factor.dim, factor.step),)
    return replace(inner, axes=(*inner.axes[:dim], cut, *inner.axes[dim + 1 :])).moved(factor.dim, start * factor.step)


def _sliced(node: Node, inner: Strided) -> Strided | None:
    arguments: tuple[Any, ...] = (*node.args[1:], *(0, 0, None, 1)[len(node.args) - 1 :])
    dim, start, _, step = arguments[:4]
    size, whole = shape_of(node)[dim], shape_of(node.args[0])[dim]  # type: ignore[index, arg-type]
    if same(size, whole):
        return inner if step == 1 else None
    if step != 1 or not isinstance(start, int) or static(size) is None:
        return None
    if start < 0:
        known = static(whole)
        if known is None:
            return None
        start += known
    return _cut(inner, int(dim) % len(inner.axes), start, size)  # type: ignore[arg-type, call-overload]


def _selected(inner: Strided, dim: int, index: int, shape: Sequence[Size]) -> Strided | None:
    if index < 0:
        known = static(shape[dim])
        if known is None:
            return None
        index += known
    axis = inner.axes[dim]
    for factor in reversed(axis):
        size = static(factor.size)
        if size is None and len(axis) > 1:
            return None
        inner = inner.moved(factor.dim, (index % size if size else index) * factor.step) if factor.dim >= 0 else inner
        index = index // size if size else 0
    return replace(inner, axes=inner.axes[:dim] + inner.axes[dim + 1 :])


def _piece(node: Node) -> Strided | None:
    """An item of a split, a chunk or an unbind."""
    source, index = node.args
    if not isinstance(source, Node) or not isinstance(index, int) or not isinstance(source.args[0], Node):
        return None
    inner, items = strided(source.args[0]), source.meta["val"]
    rank = len(inner.axes)
    if source.target is aten.unbind.int:
        dim = int(source.args[1]) % rank if len(source.args) > 1 else 0  # type: ignore[arg-type]
        return _selected(inner, dim, index, shape_of(source.args[0]))
    if source.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes):
        return None
    dim = int(source.args[2]) % rank if len(source.args) > 2 else 0  # type: ignore[arg-type]
    sizes = [static(item.shape[dim]) for item in items]
    if None in sizes:
        return None
    return _cut(inner, dim, sum(sizes[:index]), items[index].shape[dim])  # type: ignore[arg-type]


def _joined(node: Node) -> Strided | None:
    """Pieces of one tensor that lie at regular distances, side by side along an axis, or along a new one."""
    parts = [strided(part) for part in node.args[0]]  # type: ignore[union-attr, arg-type]
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
    joined = Factor(len(parts), dim, step)
    at = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    at %= len(shape_of(node))
    if node.target is aten.stack.default:
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
