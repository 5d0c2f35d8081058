"""Linear layers on CUDA one behind the other, for a few rows in one launch."""

from __future__ import annotations

import torch

from fxopt.kernels.mlp.cuda.few_rows import KERNEL, gpu_few_rows, load
from fxopt.kernels.mlp.cuda.linear import CODES
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_few_rows import find_gpu_few_rows
from fxopt.patterns.gpu_linears import Layer
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.rewrites.linear_chains import sizes_told
from fxopt.shape.sizes import shape_of


def replace_layers(editor: Editor, match: Match) -> Replacement:
    layers: list[Layer] = match.bound["layers"]
    load()
    editor.needs(KERNEL)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    codes = [CODES[layer.activation] for layer in layers]
    call = editor.call(torch.ops.fxopt.gpu_few_rows.default, layers[0].x, weights, biases, codes)
    call.meta["bound"] = gpu_few_rows
    what = f"linear layers {sizes_told(list(map(shape_of, weights)))} in one launch for up to 16 rows"
    return Replacement({match.anchor: call}, what, "weights are fetched across layers")


REWRITE = Rewrite(
    "gpu_few_rows",
    find_gpu_few_rows,
    replace_layers,
    measured=True,
    proof=True,
    why="after gpu_linears and gpu_chains, which it has to beat",
)
