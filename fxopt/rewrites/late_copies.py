"""Embedding columns beside what they would only copy: it is computed on another stream and copied in behind it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.errors import call_of
from fxopt.kernels.columns.op import kernel_on_cuda
from fxopt.kernels.columns.plan import Plan
from fxopt.kernels.late_copy.op import late_copy, load
from fxopt.patterns.branches import BESIDE, SIDE
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.late_copies import find_late_copies
from fxopt.rewrites.branches import move_to_readers, words
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor, Rejected
from fxopt.rewrites.embedding_columns import plan_in


def find(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    return find_late_copies(module, inference, functools.partial(plan_in, module))


def replace_copies(editor: Editor, match: Match) -> Replacement:
    """The call without the copies; right behind it what they wait for, and the copies, into columns that it does not
    write to. So these need not wait for the call, which only gives them memory.

    That memory is theirs before the call is done, because a call of the kernel first allocates and then launches:
    whoever had it before was launched before the branch forked.
    """
    call, plan, copies, side = (match.bound[name] for name in ("call", "plan", "copies", "side"))
    if not kernel_on_cuda():
        raise Rejected("the CUDA kernel of fxopt::columns cannot be built here; without it the call writes whole rows")
    load()
    items = sorted(call.users)
    outputs = move_to_readers(editor, [*side, call, *items])
    twin = _without_copies(editor, call, plan, {copy.tensor for copy in copies})
    found = {item: editor.call(operator.getitem, twin, item.args[1]) for item in items}
    for node in (twin, *found.values()):
        node.meta[BESIDE] = twin.name
    twins = editor.twins(side)
    for copy in copies:
        item = next(item for item in items if item.args[1] == copy.output)
        values = twins[call.args[0][copy.tensor]]
        found[item] = editor.call(torch.ops.fxopt.late_copy.default, found[item], values, copy.offset)
        found[item].meta["bound"] = late_copy
        found[item].meta[SIDE] = twin.name
    for node in twins.values():
        node.meta[SIDE] = twin.name
    what = f"{words(side)} beside {len(plan.columns)} columns, in captured graphs"
    why = "the columns only copy the result, and no longer wait for it"
    return Replacement({node: (twins | found)[node] for node in outputs}, what, why)


def _without_copies(editor: Editor, call: Node, plan: Plan, late: set[int]) -> Node:
    """The call by a plan without them. Another tensor stands where they were: the numbers in the plan stay."""
    tensors: Any = call.args[0]
    other = next(node for number, node in enumerate(tensors) if number not in late)
    kept = [other if number in late else node for number, node in enumerate(tensors)]
    twin = editor.call(torch.ops.fxopt.columns.default, kept, call.args[1], editor.constant("plan", encode(plan)))
    twin.meta["bound"], twin.meta["rowwise"] = call_of(plan), call.meta.get("rowwise")
    return twin


REWRITE = Rewrite(
    "late_copies",
    find,
    replace_copies,
    measured=True,
    proof=True,
    everywhere=True,
    why="before the other branches, which would find that the columns wait",
)
