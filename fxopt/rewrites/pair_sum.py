"""The second order of a factorization machine, and bi-interactions, as one `fxopt::pair_sum`."""

from __future__ import annotations

from fxopt.kernels.interactions.pair_sum import OPERATORS, call_of
from fxopt.patterns.interactions.pair_sums import PairSum, find_pair_sums
from fxopt.rewrites.dot_interaction import joined
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of, static


def replace_pair_sum(editor: Editor, match: Match) -> Replacement:
    found: PairSum = match.bound["pair_sum"]
    x = joined(editor, found.vectors)
    setting = found.scale, found.total
    call = editor.ours(OPERATORS, "pair_sum", call_of(*setting), x, found.weights, *setting)
    shape = shape_of(found.anchor)
    if len(shape) != 2 or static(shape[1]) != static(shape_of(call)[1]):
        call = editor.shaped(call, shape)
    what = f"the sum of the products of {shape_of(x)[1]} vectors' pairs"
    return Replacement({found.anchor: call}, what, "fp32 with another order of additions, and nothing to cancel")


REWRITE = Rewrite(
    "pair_sum",
    find_pair_sums,
    replace_pair_sum,
    why="before the dot products, whose sum it may be, and before the columns, which would pool the vectors again",
)
