"""Embedding columns beside what they would only copy: it is computed on another stream and copied in behind it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.columns.encode import encode, plan_of
from fxopt.kernels.columns.errors import call_of
from fxopt.kernels.columns.op import kernel_on_cuda
from fxopt.kernels.late_copy.op import late_copy, load
from fxopt.patterns.branches import BESIDE, SIDE
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.late_copies import find_late_copies
from fxopt.rewrites.branches import move_to_readers, words
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor, Rejected


def find(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    def plan(call: Node):
        return plan_of(getattr(module, str(call.args[2].target)))  # type: ignore[union-attr]

    return find_late_copies(module, inference, plan)


def replace_copies(editor: Editor, match: Match) -> Replacement:
    """The call without the copies; right behind it what they wait for, and the copies, into columns that it does not
    write to. So these need not wait for the call, which only gives them memory.

    That memory is theirs before the call is done, because a call of the kernel first allocates and then launches:
    whoever had it before was launched before the branch forked.
    """
    call, plan, copies, side = (match.bound[name] for name in ("call", "plan", "copies", "side"))
    if not kernel_on_cuda():
        raise Rejected("without their kernel, columns write all of a row")
    load()
    items = sorted(call.users)
    outputs = move_to_readers(editor, [*side, call, *items])
    late = {copy.tensor for copy in copies}
    other = next(node for number, node in enumerate(call.args[0]) if number not in late)
    tensors = [other if number in late else node for number, node in enumerate(call.args[0])]
    twin = editor.call(call.target, tensors, call.args[1], editor.constant("plan", encode(plan)))
    twin.meta["bound"], twin.meta["rowwise"] = call_of(plan), call.meta.get("rowwise")
    found = {item: editor.call(operator.getitem, twin, item.args[1]) for item in items}
    for node in (twin, *found.values()):
        node.meta[BESIDE] = twin.name
    twins = editor.twins(side)
    marked = list(twins.values())
    for copy in copies:
        item = next(item for item in items if item.args[1] == copy.output)
        found[item] = editor.call(
            torch.ops.fxopt.late_copy.default, found[item], twins[call.args[0][copy.tensor]], copy.offset
        )
        found[item].meta["bound"] = late_copy
        marked.append(found[item])
    for node in marked:
        node.meta[SIDE] = twin.name
    values = {node: (twins | found)[node] for node in outputs}
    return Replacement(
        values, f"{words(side)} beside {len(plan.columns)} columns, in captured graphs", "they only copy it"
    )


REWRITE = Rewrite(
    "late_copies",
    find,
    replace_copies,
    measured=True,
    proof=True,
    everywhere=True,
    why="before the other branches, which would find that the columns wait",
)
