"""Dims of size 1 sink behind what is computed pointwise, so that linears and what follows them meet in one shape."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.patterns.ones import find_ones, ones_of
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.rewrites.views import with_ones, without_ones
from fxopt.shape.calls import name_of
from fxopt.shape.sizes import shape_of


def replace_ones(editor: Editor, match: Match) -> Replacement:
    node = match.anchor
    if "source" in match.bound:
        return Replacement({node: match.bound["source"]}, "views there and back into nothing", "the same tensor")
    operands, shape = match.bound["operands"], shape_of(node)

    def narrowed(operand: Node) -> Node:
        return operands[operand] or without_ones(editor, operand, ones_of(shape_of(operand), shape))

    args, kwargs = map_arg(node.args, narrowed), map_arg(node.kwargs, narrowed)
    value = with_ones(editor, editor.call(node.target, *args, **kwargs), ones_of(shape, shape))  # type: ignore[arg-type]
    return Replacement({node: value}, f"{name_of(node)} without dims of size 1", "the same numbers")


REWRITE = Rewrite(
    "ones", find_ones, replace_ones, why="behind the linears in disguise, which often wear a dim of size 1 too many"
)
