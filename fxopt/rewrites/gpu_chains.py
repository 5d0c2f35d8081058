"""Narrow linear layers on CUDA, one after the other, in one launch."""

from __future__ import annotations

import torch

from fxopt.kernels.mlp.cuda import Chain
from fxopt.kernels.mlp.op import load
from fxopt.kernels.mlp.plan import Op, encode
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_chains import find_gpu_chains
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.shape.sizes import shape_of


def replace_chain(editor: Editor, match: Match) -> Replacement:
    load()
    inputs, state, steps = (match.bound[name] for name in ("inputs", "state", "steps"))
    plan = encode(len(inputs), steps)
    call = editor.call(torch.ops.fxopt.mlp.default, inputs, state, plan)
    call.meta["bound"] = Chain(plan)
    weights = [shape_of(state[step.tensors[0]]) for step in steps if step.op == Op.LINEAR]
    sizes = "-".join(str(size) for size in (weights[0][1], *(weight[0] for weight in weights)))
    what = f"{len(weights)} linear layers {sizes} in one launch"
    return Replacement({match.anchor: call}, what, "32 rows stay in a block's shared memory through all layers")


REWRITE = Rewrite(
    "gpu_chains",
    find_gpu_chains,
    replace_chain,
    why="after gpu_linears, whose layers it has to beat",
    measured=True,
    proof=True,
)
