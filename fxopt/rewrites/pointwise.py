"""Pointwise chains, broadcasts and small reductions as one `fxopt::pointwise` operator."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.op import call, load
from fxopt.kernels.pointwise.plan import Plan
from fxopt.patterns.core import Match
from fxopt.patterns.pointwise.find import find_crosses, find_pointwise
from fxopt.patterns.pointwise.fused import Fused
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor


def replace_pointwise(editor: Editor, match: Match) -> Replacement:
    fused: Fused = match.bound["fused"]
    editor.hoist_for(fused.inputs, match.bound["aliases"])
    load()
    node = editor.call(torch.ops.fxopt.pointwise.default, list(fused.inputs), text(fused.plan))
    node.meta |= {"bound": call, "axes": list(_axes(fused.plan))}
    values = {output: editor.call(operator.getitem, node, at) for at, output in enumerate(fused.outputs)}
    what = f"{len(fused.members)} operators as one, {len(fused.plan.steps)} steps over blocks of rows"
    return Replacement(values, what, "one pass over memory; sums in another order")


def _axes(plan: Plan) -> Iterator[tuple[list[int | None], list[int]]]:
    """The axes over which nothing is summed up: where they are in the inputs, and where in the outputs."""
    for axis in range(plan.outer):
        inputs = [given.dims.index(axis) if axis in given.dims else None for given in plan.inputs]
        yield inputs, [output.dims.index(axis) for output in plan.outputs]


CROSSES = Rewrite(
    "crosses",
    find_crosses,
    replace_pointwise,
    why="before the linear layers, which would take the products with a single column out of their chain",
    measured=True,
)
REWRITE = Rewrite(
    "pointwise",
    find_pointwise,
    replace_pointwise,
    why="after the dense passes: it takes what they have left; before row_chunks, which hides what it cuts",
    measured=True,
)
