"""Linear layers on CUDA by whichever way fills the device."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.kernels.mlp.cuda import joined
from fxopt.kernels.mlp.cuda.linear import OPERATORS, gpu_linear, gpu_padded
from fxopt.kernels.mlp.cuda.ways import ALIGNED
from fxopt.patterns.core import is_ours
from fxopt.patterns.linear_layers import find_joined_layers, find_layers, find_turned_layers
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten


def replace_linear(editor: Editor, match: Match) -> Replacement:
    x, weight, bias, activation = match.bound["arguments"]
    outputs, inputs = shape_of(weight)
    if _is_odd_row_of_dots(x) and static(outputs) != 1:
        x, weight = _padded(editor, x, weight)
    call = editor.ours(OPERATORS, "gpu_linear", gpu_linear, x, weight, bias, activation)
    what = f"linear {inputs}-{outputs}" + (f" with {activation}" if activation else "")
    return Replacement({match.anchor: call}, what, "in parts, as dot products or with an epilogue, by its sizes")


def replace_joined(editor: Editor, match: Match) -> Replacement:
    bound, arguments = joined.gpu_joined_linear, match.bound["arguments"]
    call = editor.ours(joined.OPERATORS, "gpu_joined_linear", bound, *arguments)
    outputs, inputs = shape_of(match.bound["arguments"][1])
    return Replacement({match.anchor: call}, f"cat and linear {inputs}-{outputs}", "long tensors are not copied")


def replace_turned(editor: Editor, match: Match) -> Replacement:
    turn = match.bound["turn"]
    layer = editor.call(aten.linear.default, match.bound["source"], *match.anchor.args[1:])
    values: dict[Node, Node | None] = {match.anchor: editor.call(turn.target, layer, *turn.args[1:])}
    if len(turn.users) > 1:  # a trial would make up what is turned, and what it is made of as well
        values[turn] = editor.respelled(turn, turn.args)
    return Replacement(values, f"linear in front of {turn.name}", "the bias is added within a product of whole rows")


def _is_odd_row_of_dots(x: Node) -> bool:
    """Halves that do not start at 16 bytes: to copy them at each call takes longer than to write zeros behind them."""
    if not is_ours(x, "fxopt::gpu_dots") or len(x.users) > 1 or x.meta["val"].itemsize != 2:
        return False
    return (static(shape_of(x)[1]) or 0) % ALIGNED != 0


def _padded(editor: Editor, x: Node, weight: Node) -> tuple[Node, Node]:
    """Both with zeros up to a multiple; the weight anew at each call, so that an update is seen in a graph's replay."""
    *arguments, width = x.args
    aligned = width + -width % ALIGNED  # type: ignore[operator]
    longer = editor.call(torch.ops.fxopt.gpu_dots.default, *arguments, aligned)
    longer.meta["bound"] = x.meta["bound"]
    return longer, editor.ours(OPERATORS, "gpu_padded", gpu_padded, weight, aligned)


REWRITE = Rewrite(
    "gpu_linears",
    find_layers,
    replace_linear,
    why="after everything else that would take a linear layer or an activation",
)
TURNED = Rewrite(
    "gpu_turned_linears",
    find_turned_layers,
    replace_turned,
    policy=PROVEN,
    why="behind attention, whose views of heads ask for strides; before all that takes linear layers, and before the "
    "views of columns, which turn nothing there and back",
)
OF_PIECES = Rewrite(
    "gpu_joined_linears",
    find_joined_layers,
    replace_joined,
    policy=PROVEN,
    why="behind all that takes linear layers or cats in some other way",
)
