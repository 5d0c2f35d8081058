"""Pointwise chains, broadcasts and small reductions as one `fxopt::pointwise` operator."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from fxopt.kernels.pointwise.cuda import kernel_of, pointwise_on_cuda
from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.op import OPERATORS, call
from fxopt.kernels.pointwise.plan import Plan
from fxopt.patterns.pointwise.find import find_crosses, find_pointwise
from fxopt.patterns.pointwise.fused import Fused
from fxopt.rewrites.framework import MEASURED, PROVEN, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.whole_inputs import take_for_granted


def replace_pointwise(editor: Editor, match: Match) -> Replacement:
    fused: Fused = match.bound["fused"]
    if not take_for_granted(match.bound["whole"]):
        names = ", ".join(f"'{node.meta['input']}'" for node in match.bound["whole"])
        raise Rejected(f"its results lie as {names} do, which are not contiguous in this call")
    editor.hoist_for(fused.inputs, match.bound["aliases"])
    bound, where = call, "over blocks of rows"
    if match.on_cuda:
        bound, where = pointwise_on_cuda, "in a kernel of their own"
        editor.needs(kernel_of(text(fused.plan), [node.meta["val"] for node in fused.inputs]))
    node = editor.ours(OPERATORS, "pointwise", bound, list(fused.inputs), text(fused.plan))
    node.meta["axes"] = list(_axes(fused.plan))
    values = {output: editor.call(operator.getitem, node, at) for at, output in enumerate(fused.outputs)}
    many = f"{len(fused.members)} operators as one, {len(fused.plan.steps)} steps"
    what = many if len(fused.members) > 1 else "one operator"
    return Replacement(values, f"{what} {where}", "one pass over memory; sums in another order")


def _axes(plan: Plan) -> Iterator[tuple[list[int | None], list[int]]]:
    """The axes over which nothing is summed up: where they are in the inputs, and where in the outputs."""
    for axis in range(plan.outer):
        inputs = [given.dims.index(axis) if axis in given.dims else None for given in plan.inputs]
        yield inputs, [output.dims.index(axis) for output in plan.outputs]


CROSSES = Rewrite(
    "crosses",
    find_crosses,
    replace_pointwise,
    why="before the linear layers and gpu_crosses, which would take products and layers out of their chain",
    policy=MEASURED,
    on_cuda=PROVEN,
    former=("gpu_cross_networks",),
)
REWRITE = Rewrite(
    "pointwise",
    find_pointwise,
    replace_pointwise,
    why="after the dense passes, which compute activations themselves; before row_chunks and branches, which hide what "
    "they cut",
    policy=MEASURED,
    on_cuda=PROVEN,
    former=("gpu_pointwise",),
)
