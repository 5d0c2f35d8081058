"""Redundant view operators: a chain of them becomes the fewest that give the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from fxopt.patterns.view_chains import find_views
from fxopt.rewrites.framework import Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.calls import name_of
from fxopt.shape.sizes import Size, dim_of_size, inferred, is_tensor, same, shape_of, static
from fxopt.shape.view_steps import Contiguous, Expand, Permute, Reshape, Select, Slice, Step

aten = torch.ops.aten


def replace_views(editor: Editor, match: Match) -> Replacement:
    source, steps, freed = match.bound["source"], match.bound["steps"], match.bound["freed"]
    value = made(editor, source, steps)
    if match.bound["exact"]:
        _keep_strides(match.anchor, value)
    names = [name_of(node) for node in freed]
    what = f"{', '.join(names)} -> {', '.join(type(step).__name__.lower() for step in steps) or 'nothing'}"
    return Replacement({match.anchor: value}, what, "the same elements of the same tensor, in the same order")


def made(editor: Editor, source: Node, steps: Sequence[Step]) -> Node:
    """`source` through `steps`."""
    value = source
    for step in steps:
        value = _applied(editor, value, step)
    return value


def without_ones(editor: Editor, node: Node, dims: Sequence[int]) -> Node:
    """Without these dims of size 1, by operators that `repeated` takes in many lanes, which it does no reshape."""
    for dim in sorted(dims, reverse=True):
        node = editor.call(aten.squeeze.dim, node, dim)
    return node


def with_ones(editor: Editor, node: Node, dims: Sequence[int]) -> Node:
    """With dims of size 1 at these places of the result."""
    for dim in sorted(dims):
        node = editor.call(aten.unsqueeze.default, node, dim)
    return node


def _applied(editor: Editor, value: Node, step: Step) -> Node:
    match step:
        case Slice(dim, start, size, to_end):
            return editor.call(aten.slice.Tensor, value, dim, start, 2**63 - 1 if to_end else start + _known(size))
        case Select(dim, index):
            return editor.call(aten.select.int, value, dim, index)
        case Permute(order):
            return editor.call(aten.permute.default, value, list(order))
        case Reshape(shape):
            return editor.call(aten.reshape.default, value, _written(editor, value, shape))
        case Expand(shape):
            new = len(shape) - len(shape_of(value))
            kept = [index >= new and same(size, shape_of(value)[index - new]) for index, size in enumerate(shape)]
            return editor.call(aten.expand.default, value, _spread(editor, value, shape, kept))
        case Contiguous():
            return editor.call(aten.contiguous.default, value)
    raise AssertionError(step)


def _written(editor: Editor, value: Node, shape: Sequence[Size]) -> list[int | Node]:
    """A shape as arguments: one size may be -1, the others are ints or sizes of `value`."""
    return [*(inferred(shape) or (_size(editor, value, size) for size in shape))]


def _spread(editor: Editor, value: Node, shape: Sequence[Size], kept: Sequence[bool]) -> list[int | Node]:
    return [-1 if stays else _size(editor, value, size) for size, stays in zip(shape, kept, strict=True)]


def _size(editor: Editor, value: Node, size: Size) -> int | Node:
    if static(size) is not None:
        return _known(size)
    for node in (value, *editor.point.all_input_nodes):
        if isinstance(node.meta["val"], torch.SymInt) and same(node.meta["val"], size):
            return node
        if is_tensor(node) and (found := dim_of_size([node], size)):
            return editor.call(aten.sym_size.int, *found)
    raise Rejected(f"no tensor at hand has the size {size}")


def _known(size: Size) -> int:
    known = static(size)
    assert known is not None
    return known


def _keep_strides(old: Node, new: Node) -> None:
    before, after = old.meta["val"].stride(), new.meta["val"].stride()
    if not all(map(same, before, after)):
        raise Rejected(f"its strides {list(before)} can be seen, and would be {list(after)}")


REWRITE = Rewrite(
    "views", find_views, replace_views, why="first of the shape passes: the others see through fewer views"
)
OF_COLUMNS = replace(
    REWRITE, name="views_of_columns", why="behind the columns, whose one tensor the model's views now follow at once"
)
