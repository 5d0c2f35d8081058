"""Attention over fields or short sequences as one operator, with heads split and merged by strides alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.attention.cuda import call_on_cuda, heads
from fxopt.kernels.attention.op import OPERATORS, call_of
from fxopt.kernels.attention.plan import Operand, Plan
from fxopt.kernels.pointwise.cuda import generated
from fxopt.patterns.attention import Found, find_attention
from fxopt.rewrites.attention_program import program_of
from fxopt.rewrites.framework import MEASURED, PROVEN, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.sizes import same_shape

aten = torch.ops.aten


def replace_attention(editor: Editor, match: Match) -> Replacement:
    found: Found = match.bound["found"]
    words = found.plan.words()
    masks = list(found.masks)
    if found.weights is not None:
        editor.point = found.weights  # others may read them before the values are made
        editor.hoist_for([found.query, found.key, found.value, *masks])
    bound = _on_cuda(editor, found) if match.on_cuda else call_of(words)
    called = editor.ours(OPERATORS, "attention", bound, found.query, found.key, found.value, masks, words)
    called.meta["axes"] = list(_axes(found.plan))
    merged = found.merged
    result = editor.call(operator.getitem, called, 0)
    for _ in range(merged.missing):
        result = editor.call(aten.select.int, result, 0, 0)
    values = {merged.node: _grouped(editor, result, merged.counts)}
    if found.weights is not None:
        weights = editor.call(operator.getitem, called, 1)
        values[found.weights] = _grouped(editor, weights, (*found.groups, 1, 1))
    for old, new in values.items():
        if not same_shape(old, new):
            raise Rejected(f"its result is {list(new.meta['val'].shape)}, not {list(old.meta['val'].shape)}")
    what = f"{merged.node.name}: attention of {_heads(found)} as one operator"
    return Replacement(values, what, "heads are split and merged by strides; scores stay in the cache")


def _on_cuda(editor: Editor, found: Found) -> Callable[..., Any]:
    """The call on a GPU: of a kernel for all plans, else of one that is generated for this one."""
    read = (found.query, found.key, found.value, *found.masks)
    dtypes, plan = tuple(node.meta["val"].dtype for node in read), found.plan
    if heads.serves(plan, dtypes, [_channels(found.query, plan.query), _channels(found.value, plan.value)]):
        editor.needs(heads.KERNEL)
        return heads.call_of(plan)
    program = program_of(plan)
    editor.needs(generated(program, dtypes))
    return call_on_cuda(plan, program)


def _channels(node: Node, operand: Operand) -> int | torch.SymInt:
    along = operand.axes[-1]
    return node.meta["val"].shape[along.dim] if along.size < 0 else along.size


def _axes(plan: Plan) -> Iterator[tuple[list[int | None], list[int]]]:
    """The batch factors that are a whole dim of each operand: where in the operands, and where in the results."""
    operands = [plan.query, plan.key, plan.value, *(each for each in (plan.mask, plan.bias) if each is not None)]
    for factor in range(plan.factors):
        axes = [operand.axes[factor] for operand in operands]
        if all(axis.dim < 0 or (axis.size < 0 and axis.step == 1) for axis in axes):
            yield [axis.dim if axis.dim >= 0 else None for axis in axes], [plan.order.index(factor), factor]


def _grouped(editor: Editor, node: Node, counts: tuple[int, ...]) -> Node:
    """Neighbouring dims merged: as many into each new one as `counts` says; none makes a dim of size 1."""
    for dim, count in enumerate(counts):
        if count == 0:
            node = editor.call(aten.unsqueeze.default, node, dim)
        elif count > 1:
            node = editor.call(aten.flatten.using_ints, node, dim, dim + count - 1)
    return node


def _heads(found: Found) -> str:
    return f"[{', '.join(str(size) for size in found.query.meta['val'].shape)}]"


REWRITE = Rewrite(
    "attention",
    find_attention,
    replace_attention,
    policy=MEASURED,
    on_cuda=PROVEN,
    former=("gpu_attention",),
    why="while stacked, split and transposed heads are still there to be read, before they become calls of their own",
)
