"""k-max pooling: the k largest of many short lists at once; torch sorts each with its indices."""

from __future__ import annotations

from fxopt.kernels.k_largest.cuda.largest import k_largest_on_cuda
from fxopt.kernels.k_largest.op import OPERATORS, call_of
from fxopt.patterns.k_largest import find_k_largest
from fxopt.rewrites.contractions import like
from fxopt.rewrites.framework import MEASURED, PROVEN, Editor, Match, Replacement, Rewrite
from fxopt.rewrites.views import made
from fxopt.shape.calls import name_of
from fxopt.shape.sizes import product, shape_of
from fxopt.shape.view_steps import Reshape


def replace_k_largest(editor: Editor, match: Match) -> Replacement:
    x, k, dim, source, placed = (match.bound[name] for name in ("x", "k", "dim", "rising", "placed"))
    shape = shape_of(x)
    lists = made(editor, source or x, [Reshape((product(shape[:dim]), shape[dim], product(shape[dim + 1 :])))])
    bound = k_largest_on_cuda if match.on_cuda else call_of(k, placed)
    value = editor.ours(OPERATORS, "k_largest", bound, lists, k, placed)
    if source is not None:
        value = editor.call(x.target, value)
    value = like(editor, match.anchor, made(editor, value, [Reshape(shape_of(match.anchor))]))
    after = f", then {name_of(x)} of these alone" if source is not None else ""
    how = "in their places" if placed else "without their indices"
    what = f"the {k} largest of {shape[dim]} {how}{after}"
    return Replacement({match.anchor: value}, what, "the same numbers in the same order")


REWRITE = Rewrite(
    "k_largest",
    find_k_largest,
    replace_k_largest,
    why="before pointwise chains are fused, which may end in what is taken of the largest alone",
    policy=MEASURED,
    on_cuda=PROVEN,
)
