"""Pointwise chains, broadcasts and small reductions as one `fxopt::pointwise` operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.kernels.pointwise.cuda import generated, pointwise_on_cuda
from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.op import call, load
from fxopt.kernels.pointwise.plan import Plan
from fxopt.patterns.core import Match
from fxopt.patterns.pointwise.find import find_crosses, find_crosses_on_cuda, find_on_cuda, find_pointwise
from fxopt.patterns.pointwise.fused import Fused
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor


def replace_pointwise(editor: Editor, match: Match) -> Replacement:
    return _replaced(editor, match, call, "over blocks of rows")


def replace_on_cuda(editor: Editor, match: Match) -> Replacement:
    fused: Fused = match.bound["fused"]
    editor.needs(generated(text(fused.plan), tuple(node.meta["val"].dtype for node in fused.inputs)))
    return _replaced(editor, match, pointwise_on_cuda, "in a kernel of their own")


def _replaced(editor: Editor, match: Match, bound: Callable[..., Any], where: str) -> Replacement:
    fused: Fused = match.bound["fused"]
    editor.hoist_for(fused.inputs, match.bound["aliases"])
    load()
    node = editor.call(torch.ops.fxopt.pointwise.default, list(fused.inputs), text(fused.plan))
    node.meta |= {"bound": bound, "axes": list(_axes(fused.plan))}
    values = {output: editor.call(operator.getitem, node, at) for at, output in enumerate(fused.outputs)}
    what = f"{len(fused.members)} operators as one, {len(fused.plan.steps)} steps {where}"
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
CROSSES_ON_CUDA = Rewrite(
    "gpu_cross_networks",
    find_crosses_on_cuda,
    replace_on_cuda,
    why="as crosses; before gpu_crosses, which would take the layers one by one",
    measured=True,
    proof=True,
)
ON_CUDA = Rewrite(
    "gpu_pointwise",
    find_on_cuda,
    replace_on_cuda,
    why="after the linear layers, which compute activations themselves; before branches, which hides what it cuts",
    measured=True,
    proof=True,
)
