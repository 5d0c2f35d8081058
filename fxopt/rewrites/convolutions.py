"""Chains of convolutions of kernel 1 as linears over the last dim, where the transposes around them cancel."""

from __future__ import annotations

import torch

from fxopt.patterns.contractions.convolutions import CONVOLUTIONS, find_convolutions
from fxopt.rewrites.contractions import like
from fxopt.rewrites.framework import MEASURED, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.sizes import shape_of
from fxopt.shape.strides import Layout, Strides

aten = torch.ops.aten


def replace_convolutions(editor: Editor, match: Match) -> Replacement:
    chain, x = match.bound["chain"], match.bound["reads"][0]
    rank = len(shape_of(x))
    value = editor.call(aten.permute.default, x, [0, *range(2, rank), 1])
    linears = 0
    for node in chain:
        if node.target in CONVOLUTIONS:
            weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
            flat = editor.call(aten.reshape.default, weight, [int(size) for size in shape_of(weight)[:2]])
            value, linears = editor.call(aten.linear.default, value, flat, bias), linears + 1
        else:
            value = editor.call(node.target, value, *node.args[1:], **node.kwargs)
    value = editor.call(aten.permute.default, value, [0, rank - 1, *range(1, rank - 1)])
    if Strides(editor.module.graph).asked(match.anchor) is not Layout.ANY:
        if rank > 3:  # of 4 axes, channels come last where those of the input or the weight of a call do
            raise Rejected("its strides would differ")
        value = like(editor, match.anchor, value)
    what = f"{linears} convolutions of kernel 1 into linears"
    return Replacement({match.anchor: value}, what, "channels last, as the views around them have it")


REWRITE = Rewrite(
    "convolutions",
    find_convolutions,
    replace_convolutions,
    why="behind the interactions that are spelled as convolutions, before the linears are looked for",
    policy=MEASURED,
)
