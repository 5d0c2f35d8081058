"""Small products with a matrix each on CUDA as one launch: gathers and what multiplies them are part of it."""

from __future__ import annotations

from fxopt.kernels.mlp.cuda.grouped import OPERATORS, gpu_grouped
from fxopt.patterns.contractions.terms import Factor
from fxopt.patterns.grouped_linears import Taken, find_grouped_linears
from fxopt.rewrites.contractions import arranged, like
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite


def replace_grouped(editor: Editor, match: Match) -> Replacement:
    term, (b, lane, k, n) = match.bound["term"], match.bound["axes"]
    taken: list[Taken | None] = [match.bound[name] for name in ("x", "weight", "y")]
    orders = ((b, None, k), (None, k, n), (b, None, n))  # None: where the entries are
    tensors = [
        each and arranged(editor, each.source, [(axis or each.entries,) for axis in order])
        for each, order in zip(taken, orders, strict=True)
    ]
    places = [each and each.places for each in taken]
    call = editor.ours(OPERATORS, "gpu_grouped", gpu_grouped, *tensors, *places)
    result = arranged(editor, Factor(call, ((b,), (lane,), (n,))), match.bound["dims"])
    node = like(editor, match.anchor, result, term.inside)
    what = f"{lane.size} products of [{k.size}, {n.size}] as one operator"
    return Replacement({match.anchor: node}, what, "vectors and matrices are read where they lie")


REWRITE = Rewrite(
    "gpu_grouped_linears",
    find_grouped_linears,
    replace_grouped,
    policy=PROVEN,
    why="when repeated and contractions have made batched products; before pointwise, which takes them too",
)
