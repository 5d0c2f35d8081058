"""Embedding columns: every collector that one call can serve becomes one `fxopt::columns` operator."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxopt.kernels.columns.cuda import KERNEL
from fxopt.kernels.columns.encode import encode, plan_of
from fxopt.kernels.columns.errors import call_of
from fxopt.kernels.columns.op import load
from fxopt.kernels.columns.plan import Column, Instr, Offsets, PerRow, Plan, Source
from fxopt.normalize import switches_gradients
from fxopt.patterns.core import Match, Reject, place_of
from fxopt.patterns.embedding_columns.collectors import REORDER_NOTHING, Collector, Output, Piece, find_collectors
from fxopt.patterns.embedding_columns.columns import Columns, Placed
from fxopt.patterns.embedding_columns.columns import PerRow as Value
from fxopt.patterns.embedding_columns.layout import Layout
from fxopt.patterns.groups import group
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, same, shape_of, static

aten = torch.ops.aten


def find(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """One match per group of collectors."""
    graph = module.graph
    if switches_gradients(graph) and not inference:
        yield Reject("forward switches gradients on and off; optimized where they are off", next(iter(graph.nodes)))
        return
    aliases = Aliases(graph)
    columns = Columns(graph, aliases, inference)
    collectors = find_collectors(graph, columns)
    for members in group(graph, collectors, aliases):
        placed = [column for member in members for column in member.columns]
        if len(placed) == 1 and placed[0].is_plain and len(members[0].pieces) == 1 and not _on_cuda(placed[0]):
            yield Reject("a single plain lookup is one operator already", members[0].anchor)
            continue
        reads = [read for member in members for read in member.reads]
        yield Match(
            members[0].anchor, {"collectors": members, "reads": tuple(dict.fromkeys(reads)), "aliases": aliases}
        )
    yield from columns.rejects


def replace_group(editor: Editor, match: Match) -> Replacement:
    """One call for the group, then the views and shorter cats that put its outputs where they belong."""
    collectors: list[Collector] = match.bound["collectors"]
    editor.hoist_for(match.bound["reads"], match.bound["aliases"])
    slots = _slots(collectors, match.bound["aliases"])
    outputs = list({slot: output for output, slot in slots}.values())
    builder = _PlanBuilder()
    plan = replace(builder.plan(outputs), bad_ids=editor.config.bad_ids)
    load()
    editor.needs(KERNEL)
    call = editor.call(
        torch.ops.fxopt.columns.default,
        list(builder.tensors),
        list(builder.tables),
        editor.constant("plan", encode(plan)),
    )
    call.meta["bound"], call.meta["rowwise"] = call_of(plan), _keeps_rows(plan)
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


class _PlanBuilder:
    """Numbers the tensors and tables of a call as its columns are written down."""

    def __init__(self) -> None:
        self.tensors: dict[Node, int] = {}
        self.tables: dict[Node, int] = {}

    def plan(self, outputs: list[Output]) -> Plan:
        columns = [self._column(piece, index) for index, output in enumerate(outputs) for piece in output.pieces]
        named = tuple(replace(column, name=f"column {index} ({column.name})") for index, column in enumerate(columns))
        dtypes = tuple(str(output.dtype).removeprefix("torch.") for output in outputs)
        return Plan(named, tuple(output.width for output in outputs), dtypes)

    def _column(self, piece: Piece, output: int) -> Column:
        if isinstance(piece.placed, Layout):
            return Column(self._source(piece.placed), None, output, piece.offset, add=piece.add, name="copy")
        placed = piece.placed
        lookup, pooled = placed.column.lookup, placed.column.pooled
        masking = pooled.masking if pooled else None
        table = self.tables.setdefault(lookup.table, len(self.tables))
        return Column(
            source=self._source(placed.ids),
            table=table,
            output=output,
            offset=piece.offset,
            program=tuple(self._instruction(step.instr, step.operand) for step in placed.ids.value.program),
            pool=placed.column.mode,
            bag=self._offsets(placed),
            weights=self._source(placed.weights) if placed.weights else None,
            padding=lookup.padding if lookup.bag else None,
            frozen=None if lookup.bag else lookup.padding,
            divisor=self._per_row(placed.divisor),
            lengths=self._per_row(placed.lengths),
            masked=masking.how if masking else "scaled",
            masked_value=masking.value if masking else 0.0,
            shared_grad=pooled is not None and pooled.shared_grad,
            empty_nan=pooled is not None and pooled.mode == "mean",
            wrap_negative=lookup.wrap_negative,
            add=piece.add,
            runtime_error=lookup.runtime_error,
            name=place_of(lookup.anchor).module or lookup.anchor.name,
            table_name=_table_name(lookup.table),
        )

    def _number(self, node: Node) -> int:
        return self.tensors.setdefault(node, len(self.tensors))

    def _source(self, layout: Layout) -> Source:
        lane = layout.lane
        return Source(
            tensor=self._number(layout.value.base),
            rows=tuple(part.dim for part in layout.rows),
            lane=lane.dim if lane else None,
            start=lane.start if lane else 0,
            length=None if lane is None else static(lane.size),
            fixed=layout.fixed,
        )

    def _per_row(self, value: Value | None) -> PerRow | None:
        if value is None:
            return None
        source = None if value.layout is None else self._source(value.layout)
        return PerRow(source, tuple(self._instruction(step.instr, step.operand) for step in value.steps))

    def _instruction(self, instruction: Instr, operand: Node | None) -> Instr:
        return instruction if operand is None else replace(instruction, tensor=self._number(operand))

    def _offsets(self, placed: Placed) -> Offsets | None:
        bag = placed.column.lookup.bag
        if bag is None or bag.offsets is None:
            return None
        return Offsets(self._number(bag.offsets), bag.include_last)


def _table_name(table: Node) -> str:
    slot = table.meta.get("state")
    return f"{slot.module}.{slot.name}".lstrip(".") if slot is not None else table.name


def _shaped(editor: Editor, call: Node, index: int, output: Output) -> Node:
    """The call's output [rows, width] in the shape its users expect."""
    flat = editor.call(operator.getitem, call, index)
    if len(output.shape) == 2 and len(output.rows) == 1:
        return flat
    known = [static(size) for size in output.shape]
    if known.count(None) == 1 and 0 not in known:  # of bags with offsets of B + 1, no input need have the size B
        return editor.call(aten.view.default, flat, [-1 if size is None else size for size in known])
    return editor.call(aten.view.default, flat, [_size(editor, output, size) for size in output.shape])


def _size(editor: Editor, output: Output, size: Size) -> int | Node:
    known = static(size)
    return known if known is not None else editor.call(aten.sym_size.int, *_carrier(output, size))


def _carrier(output: Output, size: Size) -> tuple[Node, int]:
    """An input of the call, and its dim, that has this size."""
    for piece in output.pieces:
        for node in piece.placed.reads:
            for dim, candidate in enumerate(shape_of(node)):
                if same(candidate, size):
                    return node, dim
    raise Rejected(f"no input of the call has the size {size}")


REWRITE = Rewrite(
    "embedding_columns",
    find,
    replace_group,
    why="after interactions and repeated lanes: it writes the vectors where those read them",
    safer_on_cuda=True,  # torch's own lookups meet a bad id with an assert that ends the process
)
