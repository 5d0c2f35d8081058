"""Where the axes of a mask come from, through views of it: which counts along a row, and which repeats."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.shape import view_operators
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.view_operators import ORDERS, REGROUPS, REPEATS, SAME, through
from fxopt.shape.view_steps import Expand
from fxopt.shape.views import View

LANE = -1  # the axis that counts along a row; others are numbered as in the atom's tensor, None: it repeats
Axes = tuple[int | None, ...]

CASTS = view_operators.CASTS | SAME | {torch.ops.aten.detach.default}
VIEWS = {*ORDERS, *REPEATS, *REGROUPS}


def numbered(node: Node) -> Axes:
    return tuple(None if static(size) == 1 else axis for axis, size in enumerate(shape_of(node)))


def moved_axes(node: Node, axes: Axes) -> Axes | None:
    """The axes of a view or a cast, given those of what it reads; what repeats already may be repeated once more."""
    if node.target in CASTS:
        return axes
    source, step = through(node, REPEATS) or (node, None)
    repeats = isinstance(step, Expand)
    sizes = [1 if axis is None and repeats else size for axis, size in zip(axes, shape_of(source), strict=True)]
    view = View.of(sizes).after(step)
    dims = view.whole_dims(sizes) if view is not None else None
    return None if dims is None else tuple(None if dim is None else axes[dim] for dim in dims)


def unrepeated(node: Node) -> tuple[Node, Axes]:
    """What `node` repeats, and where its axes are in `node`."""
    source = node.args[0] if node.target in REPEATS else None
    if not isinstance(source, Node):
        return node, numbered(node)
    found, axes = unrepeated(source)
    moved = moved_axes(node, axes)
    return (found, moved) if moved is not None else (node, numbered(node))
