"""Embedding columns: every collector that one call can serve becomes one `fxopt::columns` operator."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.fx import Node

from fxopt.kernels.columns.cuda import KERNEL
from fxopt.kernels.columns.encode import encode, plan_of
from fxopt.kernels.columns.errors import call_of
from fxopt.kernels.columns.op import OPERATORS, load
from fxopt.kernels.columns.plan import Column, Plan, Source
from fxopt.patterns.core import Reject, Search
from fxopt.patterns.embedding_columns.collectors import (
    REORDER_NOTHING,
    Collector,
    Output,
    find_collectors,
    looked_up_again,
)
from fxopt.patterns.embedding_columns.columns import Columns
from fxopt.patterns.embedding_columns.index_program import left_in_front
from fxopt.patterns.embedding_columns.placed import Placed
from fxopt.patterns.groups import group
from fxopt.rewrites.columns_plan import PlanBuilder
from fxopt.rewrites.framework import Editor, Match, Rejected, Replacement, Rewrite
from fxopt.rewrites.framework.editor import fake_mode_of
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, dim_of_size, inferred, static

aten = torch.ops.aten


def find(search: Search) -> Iterator[Match | Reject]:
    """One match per group of collectors."""
    graph, aliases = search.graph, search.aliases
    if search.changes_modes:
        yield Reject("forward switches gradients on and off; optimized where they are off", next(iter(graph.nodes)))
        return
    columns = Columns(search)
    groups = group(graph, find_collectors(graph, columns), aliases)
    if not search.inference and (again := looked_up_again(groups)):
        columns.copied = again
        groups = group(graph, find_collectors(graph, columns), aliases)
    for members in groups:
        placed = [column for member in members for column in member.columns]
        # a backward of ours takes longer than that of a lookup
        alone = len(members[0].pieces) == 1 or not search.inference
        if len(placed) == 1 and placed[0].is_plain and alone and not _on_cuda(placed[0]):
            yield Reject("a single plain lookup is one operator already", members[0].anchor)
            continue
        reads = [read for member in members for read in member.reads]
        yield Match(
            members[0].anchor, {"collectors": members, "reads": tuple(dict.fromkeys(reads)), "aliases": aliases}
        )
    yield from dict.fromkeys(columns.rejects)
    yield from left_in_front(graph)


def replace_group(editor: Editor, match: Match) -> Replacement:
    """One call for the group, then the views and shorter cats that put its outputs where they belong."""
    collectors: list[Collector] = match.bound["collectors"]
    editor.hoist_for(match.bound["reads"], match.bound["aliases"])
    slots = _slots(collectors, match.bound["aliases"])
    outputs = list({slot: output for output, slot in slots}.values())
    builder = PlanBuilder(editor)
    load()
    plan = replace(builder.plan(outputs), bad_ids=editor.config.bad_ids)
    editor.needs(KERNEL)
    arguments = list(builder.tensors), list(builder.tables), editor.constant("plan", encode(plan))
    call = editor.ours(OPERATORS, "columns", call_of(plan), *arguments)
    call.meta["rowwise"] = _keeps_rows(plan)
    written = iter([_shaped(editor, call, slot, output) for output, slot in slots])
    values = {}
    for collector in collectors:
        parts = [next(written) if isinstance(part, Output) else part for part in collector.parts]
        values[collector.anchor] = parts[0] if len(parts) == 1 else editor.call(aten.cat.default, parts, collector.dim)
    count = len(plan.columns)
    into = "tensor" if len(outputs) == 1 else "tensors"
    what = f"{sum(column.table is not None for column in plan.columns)} columns into {len(outputs)} {into}, one call"
    why = "same rows, same order; ids are checked inside the lookup"
    return Replacement(values, what if count > 1 else "1 column with its index program, one call", why)


def plan_in(module: nn.Module, columns: Node) -> Plan:
    """The plan of a call of fxopt::columns, or of one that takes the same arguments."""
    return plan_of(getattr(module, str(columns.args[2].target)))  # type: ignore[union-attr]


def _on_cuda(placed: Placed) -> bool:
    """There a bad id of torch's own lookup is an assert, after which the process cannot use the device."""
    return placed.column.lookup.table.meta["val"].is_cuda


def _slots(collectors: list[Collector], aliases: Aliases) -> list[tuple[Output, int]]:
    """Every output with its number in the call; two that hold the same rows in other shapes share one."""
    numbers: dict[object, int] = {}
    slots = []
    for collector in collectors:
        shareable = not aliases.edited(collector.anchor) and not _returned(collector.anchor)
        for output in collector.outputs:
            key = (output.pieces, output.width, output.dtype) if shareable else id(output)
            slots.append((output, numbers.setdefault(key, len(numbers))))
    return slots


def _returned(node: Node) -> bool:
    """Whether a value, or a view of it, leaves the model: its memory must then be its own."""
    return any(user.op == "output" or (user.target in REORDER_NOTHING and _returned(user)) for user in node.users)


def _keeps_rows(plan: Plan) -> bool:
    """Whether row b of every output reads row b of the inputs, which is their first dim."""
    return all(
        column.bag is None and source.rows[:1] in ((), (0,)) for column in plan.columns for source in _sources(column)
    )


def _sources(column: Column) -> list[Source]:
    per_row = (column.lengths, column.divisor)
    sources = [column.source, column.weights, *(value.source for value in per_row if value is not None)]
    return [source for source in sources if source is not None]


def _shaped(editor: Editor, call: Node, index: int, output: Output) -> Node:
    """The call's output [rows, width] in the shape its users expect."""
    if output.counted:
        return editor.known(_of_shape(editor, output), operator.getitem, call, index)
    flat = editor.call(operator.getitem, call, index)
    if len(output.shape) == 2 and len(output.rows) == 1:
        return flat
    if inferred(output.shape):  # of bags with offsets of B + 1, no input need have the size B
        return editor.shaped(flat, output.shape)
    return editor.call(aten.view.default, flat, [_size(editor, output, size) for size in output.shape])


def _of_shape(editor: Editor, output: Output) -> torch.Tensor:
    """A row for each id of a feature: as many as the model itself has counted."""
    with fake_mode_of(editor.module):
        return torch.empty(output.shape, dtype=output.dtype, device="cpu")  # elsewhere nothing is counted


def _size(editor: Editor, output: Output, size: Size) -> int | Node:
    if (known := static(size)) is not None:
        return known
    found = dim_of_size((node for piece in output.pieces for node in piece.placed.reads), size)
    if found is None:
        raise Rejected(f"no input of the call has the size {size}")
    return editor.call(aten.sym_size.int, *found)


REWRITE = Rewrite(
    "embedding_columns",
    find,
    replace_group,
    why="after interactions and repeated lanes: it writes the vectors where those read them",
    safer_on_cuda=True,  # torch's own lookups meet a bad id with an assert that ends the process
)
