"""A chain of linear layers in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxopt.kernels.mlp.layers import is_wide
from fxopt.kernels.mlp.op import load, on
from fxopt.kernels.mlp.plan import Op, encode
from fxopt.patterns.core import Match
from fxopt.patterns.linear_chains import find_chains
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.shape.sizes import Size, shape_of


def sizes_told(weights: Sequence[Sequence[Size]]) -> str:
    """As "13-512-256": the widths of layers of shapes [N, K], one behind the other."""
    return "-".join(str(size) for size in (weights[0][1], *(weight[0] for weight in weights)))


def replace_chain(editor: Editor, match: Match) -> Replacement:
    load()
    inputs, state, steps = (match.bound[name] for name in ("inputs", "state", "steps"))
    plan = encode(len(inputs), steps)
    call = editor.call(torch.ops.fxopt.mlp.default, inputs, state, plan)
    weights = [shape_of(state[step.tensors[0]]) for step in steps if step.op == Op.LINEAR]
    call.meta["bound"] = on(plan, any(is_wide(*weight) for weight in weights))
    others = [step.op.name.lower() for step in steps if step.op != Op.LINEAR]
    with_others = f", with {', '.join(others)}" if others else ""
    what = f"{len(weights)} linear layers {sizes_told(weights)} in one call{with_others}"
    return Replacement({match.anchor: call}, what, "a block of rows stays in the cache through all layers")


REWRITE = Rewrite(
    "linear_chains",
    find_chains,
    replace_chain,
    why="after what makes linear layers and joins parallel ones; before pointwise, which would take the activations",
    measured=True,
)
