"""Linear layers on CUDA by whichever way fills the device."""

from __future__ import annotations

import torch

from fxopt.kernels.gpu_linear.op import gpu_linear, load
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_linears import find_gpu_linears
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.shape.sizes import shape_of


def replace_linear(editor: Editor, match: Match) -> Replacement:
    load()
    x, weight, bias, activation = match.bound["arguments"]
    call = editor.call(torch.ops.fxopt.gpu_linear.default, x, weight, bias, activation)
    call.meta["bound"] = gpu_linear
    outputs, inputs = shape_of(weight)
    what = f"linear {inputs}-{outputs}" + (f" with {activation}" if activation else "")
    return Replacement({match.anchor: call}, what, "in parts, as dot products or with an epilogue, by its sizes")


REWRITE = Rewrite(
    "gpu_linears",
    find_gpu_linears,
    replace_linear,
    why="after everything else that would take a linear layer or an activation",
)
