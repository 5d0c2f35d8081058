"""Attention over the products of pairs as one `fxopt::pair_attention`: [B, P, D] is never made."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.kernels.interactions.attention import OPERATORS
from fxopt.patterns.interactions.attention import Affine, find_attention
from fxopt.rewrites.dot_interaction import joined
from fxopt.rewrites.framework import MEASURED, Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of

aten = torch.ops.aten


def replace_attention(editor: Editor, match: Match) -> Replacement:
    bound = match.bound
    x = joined(editor, bound["vectors"])
    i, j = (editor.constant("pairs", bound[name]) for name in "ij")
    hidden, query = bound["hidden"], bound["query"]
    weights = _weight(editor, hidden), hidden.bias, _weight(editor, query), query.bias
    both = editor.ours(OPERATORS, "pair_attention", None, x, i, j, *weights)
    pooled, scores = (editor.call(operator.getitem, both, place) for place in range(2))
    values: dict[Node, Node | None] = {node: editor.in_shape_of(node, pooled) for node in bound["pooled"]}
    values[match.anchor] = editor.in_shape_of(match.anchor, scores)
    what = f"attention over {shape_of(i)[0]} products of {shape_of(x)[1]} vectors"
    return Replacement(values, what, "fp32 with another order of additions")


def _weight(editor: Editor, affine: Affine) -> Node:
    """[outputs, inputs]."""
    return editor.call(aten.permute.default, affine.weight, [1, 0]) if affine.turned else affine.weight


REWRITE = Rewrite(
    "pair_attention",
    find_attention,
    replace_attention,
    why="before the columns, which would look up both sides of each pair",
    policy=MEASURED,
)
