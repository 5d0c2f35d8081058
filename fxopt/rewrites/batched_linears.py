"""Linear layers on CUDA side by side: those of one input as a wide layer, those of the same sizes as a batched product.

Their weights are joined anew at each call, so that an update is seen, also by a graph's replay.
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import Node

from fxopt.kernels.mlp.cuda.linear import OPERATORS, gpu_linear
from fxopt.patterns.batched_linears import find_batched_linears, find_wide_linears
from fxopt.patterns.linear_layers import Layer
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
_ACTIVATIONS = {"relu": aten.relu.default, "sigmoid": aten.sigmoid.default}


def replace_by_wide(editor: Editor, match: Match) -> Replacement:
    layers: list[Layer] = match.bound["layers"]
    editor.hoist_for(match.bound["reads"])
    weight = editor.call(aten.cat.default, [layer.weight for layer in layers])
    bias = layers[0].bias and editor.call(aten.cat.default, [layer.bias for layer in layers])
    wide = editor.ours(OPERATORS, "gpu_linear", gpu_linear, layers[0].x, weight, bias, layers[0].activation)
    widths = [static(shape_of(layer.weight)[0]) for layer in layers]
    ends = list(itertools.accumulate(widths))  # type: ignore[arg-type]
    values = {
        layer.anchor: editor.call(aten.slice.Tensor, wide, 1, end - width, end)  # type: ignore[operator]
        for layer, end, width in zip(layers, ends, widths, strict=True)
    }
    what = f"{len(layers)} linear layers {shape_of(weight)[1]}-{' and '.join(map(str, widths))} as one"
    return Replacement(values, what, "one product and one epilogue")


def replace_linears(editor: Editor, match: Match) -> Replacement:
    layers: list[Layer] = match.bound["layers"]
    editor.hoist_for(match.bound["reads"])
    weights = editor.call(aten.stack.default, [layer.weight for layer in layers])
    turned = editor.call(aten.transpose.int, weights, 1, 2)
    x = _inputs(editor, layers)
    y = editor.call(aten.bmm.default, x, turned)  # the shapes of baddbmm do not follow symbolic sizes
    if layers[0].bias is not None:
        biases = editor.call(aten.stack.default, [layer.bias for layer in layers])
        y = editor.call(aten.add.Tensor, y, editor.call(aten.unsqueeze.default, biases, 1))
    if layers[0].activation:
        y = editor.call(_ACTIVATIONS[layers[0].activation], y)
    outputs, inputs = shape_of(layers[0].weight)
    if middle := shape_of(layers[0].x)[1:-1]:
        y = editor.call(aten.view.default, y, [len(layers), -1, *middle, outputs])
    values = {layer.anchor: editor.call(aten.select.int, y, 0, at) for at, layer in enumerate(layers)}
    return Replacement(
        values, f"{len(layers)} linear layers {inputs}-{outputs} as one batched product", "fewer launches"
    )


def _inputs(editor: Editor, layers: list[Layer]) -> Node:
    """[layers, M, K]."""
    if any(layer.x is not layers[0].x for layer in layers):
        return _rows(editor, editor.call(aten.stack.default, [layer.x for layer in layers]), 1)
    x = editor.call(aten.unsqueeze.default, _rows(editor, layers[0].x, 0), 0)
    return editor.call(aten.expand.default, x, [len(layers), -1, -1])


def _rows(editor: Editor, x: Node, dim: int) -> Node:
    """All dims from this one to the last but one are one."""
    return x if x.meta["val"].dim() == dim + 2 else editor.call(aten.flatten.using_ints, x, dim, -2)


WIDE = Rewrite(
    "gpu_wide_linears",
    find_wide_linears,
    replace_by_wide,
    policy=PROVEN,
    why="before gpu_chains, which would take some of them, with what follows, each from its own input",
)
REWRITE = Rewrite(
    "gpu_batched_linears",
    find_batched_linears,
    replace_linears,
    policy=PROVEN,
    why="after gpu_chains, which takes the narrow ones in one launch and copies no weights",
)
