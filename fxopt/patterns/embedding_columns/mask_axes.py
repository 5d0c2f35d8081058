"""Where the axes of a mask come from, through views of it: which counts along a row, and which repeats."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.shape.sizes import same, shape_of, static
from fxopt.shape.view_operators import CASTS as _CASTS

aten = torch.ops.aten
LANE = -1  # the axis that counts along a row; others are numbered as in the atom's tensor, None: it repeats
Axes = tuple[int | None, ...]

CASTS = (
    *_CASTS,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default,
)  # fmt: skip
_PERMUTES = (aten.transpose.int, aten.permute.default, aten.t.default)
_REPEATS = (aten.expand.default, aten.expand_as.default, aten.repeat.default, aten.repeat_interleave.self_int)
VIEWS = (
    *_PERMUTES, *_REPEATS, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default,
)  # fmt: skip


def numbered(node: Node) -> Axes:
    return tuple(None if static(size) == 1 else axis for axis, size in enumerate(shape_of(node)))


def moved_axes(node: Node, axes: Axes) -> Axes | None:
    """The axes of a view, given those of what it views."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = shape_of(source), shape_of(node)
    if node.target in _PERMUTES:
        order = _order(node, len(before))
        return tuple(axes[dim] for dim in order)
    if node.target in _REPEATS:
        if len(after) < len(before):
            return None  # repeat_interleave without a dim flattens
        axes, before = (None,) * (len(after) - len(axes)) + axes, (1,) * (len(after) - len(before)) + before
        return axes if all(axis is None or same(b, a) for axis, b, a in zip(axes, before, after, strict=True)) else None
    real = [axis for axis, size in zip(axes, before, strict=True) if static(size) != 1]
    kept = [size for size in before if static(size) != 1]
    sizes = [size for size in after if static(size) != 1]
    if len(kept) != len(sizes) or not all(map(same, kept, sizes)):
        return None
    left = iter(real)
    return tuple(None if static(size) == 1 else next(left) for size in after)


def _order(node: Node, rank: int) -> list[int]:
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    if node.target is aten.t.default:
        return order[::-1]
    first, second = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return order


def unrepeated(node: Node) -> tuple[Node, Axes]:
    """What `node` repeats, and where its axes are in `node`."""
    source = node.args[0] if node.target in _REPEATS else None
    if not isinstance(source, Node):
        return node, numbered(node)
    found, axes = unrepeated(source)
    moved = moved_axes(node, axes)
    return (found, moved) if moved is not None else (node, numbered(node))
