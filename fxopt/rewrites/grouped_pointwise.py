"""Calls of one pointwise plan as one launch, `fxopt::gpu_grouped_pointwise`."""

from __future__ import annotations

import operator

from torch.fx import Node

from fxopt.kernels.pointwise.cuda import OPERATORS, kernel_of, pointwise_on_cuda
from fxopt.patterns.grouped_pointwise import Call, find_grouped_pointwise
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite


def replace_calls(editor: Editor, match: Match) -> Replacement:
    calls: list[Call] = match.bound["calls"]
    reads, plan = [read for call in calls for read in call.reads], calls[0].plan
    editor.hoist_for(reads)
    editor.needs(kernel_of(plan, [read.meta["val"] for read in reads]))
    node = editor.ours(OPERATORS, "gpu_grouped_pointwise", pointwise_on_cuda, reads, plan)
    axes = calls[0].anchor.meta["axes"]
    node.meta["axes"] = [(before * len(calls), after * len(calls)) for before, after in axes]
    values = dict[Node, Node | None]()
    for number, call in enumerate(calls):
        many = len(call.anchor.meta["val"])
        for given in call.anchor.users:
            values[given] = editor.call(operator.getitem, node, number * many + given.args[1])  # type: ignore[operator]
    return Replacement(values, f"{len(calls)} calls of one plan in one launch", "fewer launches")


REWRITE = Rewrite(
    "gpu_grouped_pointwise",
    find_grouped_pointwise,
    replace_calls,
    policy=PROVEN,
    why="after pointwise, whose calls these are; before branches, which would have them wait for each other",
)
