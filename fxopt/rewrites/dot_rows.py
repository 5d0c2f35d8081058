"""Dots of pairs on CUDA and the cat that takes them, in one launch, which may also look their vectors up."""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Plan
from fxopt.kernels.interactions.cuda import dot_rows, gathered
from fxopt.kernels.interactions.serves import MOST_DIM, MOST_VECTORS, STEPS, fits, vectors
from fxopt.patterns.interactions.dot_rows import find_gathered, find_rows
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.rewrites.framework import PROVEN, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.sizes import shape_of, static


def replace_row(editor: Editor, match: Match) -> Replacement:
    arguments = [match.bound[name] for name in ("z", "before", "i", "j")]
    call = editor.ours(dot_rows.OPERATORS, "gpu_dots", dot_rows.gpu_dots, *arguments, shape_of(match.anchor)[1])
    what = f"dots of {shape_of(match.bound['z'])[1]} vectors in one row with what stands before them"
    return Replacement({match.anchor: call}, what, "a warp a sample, summed in fp32")


def replace_gathered(editor: Editor, match: Match) -> Replacement:
    columns = match.bound["columns"]
    tensors, tables, _ = columns.args
    plan = plan_in(editor.module, columns)
    n = _vectors(plan, match.bound["z"])
    held = [tensors[c.source.tensor] if c.table is None else tables[c.table] for c in plan.columns]
    dtype = match.anchor.meta["val"].dtype
    if other := next((node for node in held if node.meta["val"].dtype != dtype), None):
        raise Rejected(f"'{other.name}': expected {dtype}, as the vectors are, found {other.meta['val'].dtype}")
    gathered.load(match.anchor.meta["val"].device)
    arguments = (*columns.args, *match.bound["rest"])
    call = editor.ours(gathered.OPERATORS, "gathered_dots", gathered.call_of(plan), *arguments)
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


REWRITE = Rewrite("gpu_dots", find_rows, replace_row, why="after field_index, whose operator it takes")
OF_FLOATS = Rewrite(
    "gpu_dots_of_floats",
    functools.partial(find_rows, dtypes=(torch.float32,)),
    replace_row,
    policy=PROVEN,
    why="the same on CUDA cores, whose rate a product in TF32 may beat",
)
GATHERED = Rewrite(
    "gpu_gathered_dots",
    find_gathered,
    replace_gathered,
    policy=PROVEN,
    why="after gpu_dots, which it has to beat, and gpu_linears, which says how wide its rows are",
)
