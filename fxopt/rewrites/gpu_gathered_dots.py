"""Lookups on CUDA and the dots of what they find, in one launch."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Plan
from fxopt.kernels.interactions.cuda.gathered import KERNEL, call_of, load
from fxopt.kernels.interactions.serves import MOST_DIM, MOST_VECTORS, STEPS, fits, vectors
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_gathered_dots import find_gathered_dots
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor, Rejected
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.shape.sizes import shape_of, static


def replace_gathered_dots(editor: Editor, match: Match) -> Replacement:
    columns = match.bound["columns"]
    tensors, tables, _ = columns.args
    plan = plan_in(editor.module, columns)
    n = _vectors(plan, match.bound["z"])
    held = [tensors[c.source.tensor] if c.table is None else tables[c.table] for c in plan.columns]
    dtype = match.anchor.meta["val"].dtype
    if other := next((node for node in held if node.meta["val"].dtype != dtype), None):
        raise Rejected(f"'{other.name}': expected {dtype}, as the vectors are, found {other.meta['val'].dtype}")
    load(match.anchor.meta["val"].device)
    editor.needs(KERNEL)
    arguments = (*columns.args, *match.bound["rest"])
    call = editor.call(torch.ops.fxopt.gathered_dots.default, *arguments)
    call.meta["bound"] = call_of(plan)
    what = f"{n} vectors and their dots, one call"
    return Replacement({match.anchor: call}, what, "a warp a sample reads the rows from their tables")


def _vectors(plan: Plan, z: Node) -> int:
    dim = static(shape_of(z)[2]) or 0
    n, dtype = vectors(plan, dim), z.meta["val"].dtype
    if n is None:
        raise Rejected("expected vectors that are plain lookups or copies, found pooling or a computation")
    if not fits(dtype, n, dim):
        most = f"{MOST_VECTORS} vectors whose width is a multiple of {STEPS[dtype]} up to {MOST_DIM}"
        raise Rejected(f"expected at most {most}, found {n} of {dim} in {dtype}")
    return n


REWRITE = Rewrite(
    "gpu_gathered_dots",
    find_gathered_dots,
    replace_gathered_dots,
    measured=True,
    proof=True,
    why="after gpu_dots, which it has to beat, and gpu_linears, which says how wide its rows are",
)
