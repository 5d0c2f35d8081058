"""Layers of cross networks on CUDA: all of a layer in one launch, or what follows its product."""

from __future__ import annotations

import torch

from fxopt.kernels.mlp.cuda.cross import OPERATORS, gpu_cross
from fxopt.patterns.cross_layers import find_cross_layers
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of

aten = torch.ops.aten


def replace_cross(editor: Editor, match: Match) -> Replacement:
    if "matrix" in match.bound:
        x0, product, x = match.bound["matrix"]
        call = editor.call(aten.addcmul.default, x, x0, product)
        return Replacement({match.anchor: call}, "a product and a sum", "one pass over memory, rounded once")
    call = editor.ours(OPERATORS, "gpu_cross", gpu_cross, *match.bound["layer"])
    what = f"a cross layer of {shape_of(match.anchor)[1]} columns as one operator"
    return Replacement({match.anchor: call}, what, "one launch for the product and what follows it")


REWRITE = Rewrite(
    "gpu_crosses",
    find_cross_layers,
    replace_cross,
    policy=PROVEN,
    why="after gpu_linears, whose layers it takes; before gpu_chains, which would take them first",
)
