"""Narrow linear layers on CUDA, one after the other and side by side, in one launch."""

from __future__ import annotations

import operator

import torch

from fxopt.kernels.mlp.cuda.chains import KERNEL, Chains, load
from fxopt.kernels.mlp.plan import Op, encode, joined
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_chains import find_gpu_chains
from fxopt.patterns.linear_chains import Chain
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.rewrites.linear_chains import sizes_told
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import shape_of


def replace_chains(editor: Editor, match: Match) -> Replacement:
    chains: list[Chain] = match.bound["chains"]
    inputs, state = ([node for chain in chains for node in getattr(chain, name)] for name in ("inputs", "state"))
    editor.hoist_for([*inputs, *state], Aliases(editor.module.graph))
    load()
    editor.needs(KERNEL)
    plan = joined([(len(chain.state), encode(1, chain.steps)) for chain in chains])
    call = editor.call(torch.ops.fxopt.mlp_chains.default, inputs, state, plan)
    call.meta["bound"] = Chains(plan)
    values = {chain.inside[-1]: editor.call(operator.getitem, call, at) for at, chain in enumerate(chains)}
    what = f"linear layers {' and '.join(map(_sizes, chains))} in one launch"
    return Replacement(values, what, "32 rows stay in a block's shared memory through all layers")


def _sizes(chain: Chain) -> str:
    weights = [shape_of(chain.state[step.tensors[0]]) for step in chain.steps if step.op == Op.LINEAR]  # type: ignore
    return sizes_told(weights)


REWRITE = Rewrite(
    "gpu_chains",
    find_gpu_chains,
    replace_chains,
    measured=True,
    proof=True,
    why="after gpu_linears, whose layers it has to beat",
)
