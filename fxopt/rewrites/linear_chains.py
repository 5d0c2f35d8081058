"""Chains of linear layers in one call: on the CPU, and on CUDA as narrow layers or for a few rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from torch.fx import Node

from fxopt.kernels.mlp.cuda import chains as cuda_chains
from fxopt.kernels.mlp.cuda import few_rows
from fxopt.kernels.mlp.cuda.linear import CODES
from fxopt.kernels.mlp.layers import is_wide
from fxopt.kernels.mlp.op import OPERATORS, call_of
from fxopt.kernels.mlp.plan import Op, encode, joined
from fxopt.kernels.mlp.serves import FEW_ROWS, MOST_ROWS, NARROW
from fxopt.patterns.linear_chains import Chain, find_chains
from fxopt.rewrites.framework import MEASURED, PROVEN, Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of


def _sizes(chain: Chain) -> str:
    """As "13-512-256": the widths of its layers, one behind the other."""
    shapes = list(map(shape_of, chain.weights))
    return "-".join(str(size) for size in (shapes[0][1], *(shape[0] for shape in shapes)))


def replace_chain(editor: Editor, match: Match) -> Replacement:
    (chain,) = match.bound["chains"]
    plan = encode(len(chain.inputs), chain.steps)
    bound = call_of(plan, any(is_wide(*shape_of(weight)) for weight in chain.weights))
    call = editor.ours(OPERATORS, "mlp", bound, chain.inputs, chain.state, plan)
    others = [step.op.name.lower() for step in chain.steps if step.op != Op.LINEAR]
    with_others = f", with {', '.join(others)}" if others else ""
    layers = "1 linear layer" if len(chain.weights) == 1 else f"{len(chain.weights)} linear layers"
    what = f"{layers} {_sizes(chain)} in one call{with_others}"
    return Replacement({match.anchor: call}, what, "a block of rows stays in the cache through all layers")


def replace_narrow(editor: Editor, match: Match) -> Replacement:
    chains: Sequence[Chain] = match.bound["chains"]
    inputs, state = ([node for chain in chains for node in getattr(chain, name)] for name in ("inputs", "state"))
    editor.hoist_for([*inputs, *state])
    plan = joined([(len(chain.state), encode(1, chain.steps)) for chain in chains])
    call = editor.ours(cuda_chains.OPERATORS, "mlp_chains", cuda_chains.Chains(plan), inputs, state, plan)
    values = {chain.anchor: editor.call(operator.getitem, call, at) for at, chain in enumerate(chains)}
    what = f"linear layers {' and '.join(map(_sizes, chains))} in one launch"
    return Replacement(values, what, "rows stay in a block's shared memory through all layers")


def replace_for_few_rows(editor: Editor, match: Match) -> Replacement:
    (chain,) = match.bound["chains"]
    biases: list[Node | None] = []
    codes: list[int] = []
    for step in chain.steps:
        if step.op == Op.LINEAR:
            biases.append(None if step.tensors[1] is None else chain.state[step.tensors[1]])
            codes.append(CODES[""])
        else:
            codes[-1] = CODES[step.op.name.lower()]
    arguments = chain.inputs[0], chain.weights, biases, codes
    call = editor.ours(few_rows.OPERATORS, "gpu_few_rows", few_rows.gpu_few_rows, *arguments)
    what = f"linear layers {_sizes(chain)} in one launch for up to {MOST_ROWS} rows"
    return Replacement({match.anchor: call}, what, "weights are fetched across layers")


REWRITE = Rewrite(
    "linear_chains",
    find_chains,
    replace_chain,
    why="after what makes linear layers and joins parallel ones; before pointwise, which would take the activations",
    policy=MEASURED,
)
OF_NARROW_LAYERS = Rewrite(
    "gpu_chains",
    functools.partial(find_chains, cut=NARROW),
    replace_narrow,
    policy=PROVEN,
    why="after gpu_linears, whose layers it has to beat",
)
FOR_FEW_ROWS = Rewrite(
    "gpu_few_rows",
    functools.partial(find_chains, cut=FEW_ROWS),
    replace_for_few_rows,
    policy=PROVEN,
    why="after gpu_linears and gpu_chains, which it has to beat",
)
