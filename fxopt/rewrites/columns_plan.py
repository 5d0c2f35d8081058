"""The columns of a match as a plan of fxopt::columns, with the tensors and tables that it numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.op import OPERATORS, offsets_call_of
from fxopt.kernels.columns.plan import Column, Instr, Offsets, PerRow, Plan, Source
from fxopt.patterns.core import place_of
from fxopt.patterns.embedding_columns.collectors import Output, Piece
from fxopt.patterns.embedding_columns.layout import Layout
from fxopt.patterns.embedding_columns.placed import PerRow as Value
from fxopt.patterns.embedding_columns.placed import Placed
from fxopt.patterns.jagged.segments import Segment
from fxopt.rewrites.framework.editor import Editor
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten


class PlanBuilder:
    """Numbers the tensors and tables of a call as its columns are written down."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.tensors: dict[Node, int] = {}
        self.tables: dict[Node, int] = {}
        self._jagged: dict[tuple[Node, tuple[Node, ...], bool], Node] = {}

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
        bag, segment = placed.column.lookup.bag, placed.column.lookup.segment
        if segment is not None:
            return Offsets(self._number(self._jagged_offsets(segment)), True, segment.number, segment.count)
        if bag is None or bag.offsets is None:
            return None
        return Offsets(self._number(bag.offsets), bag.include_last)

    def _jagged_offsets(self, segment: Segment) -> Node:
        key = (segment.lengths, segment.checked, segment.exact)
        if key not in self._jagged:
            lengths = segment.lengths
            if len(shape_of(lengths)) > 1:
                lengths = self.editor.call(aten.reshape.default, lengths, [-1])
            bound, arguments = offsets_call_of(segment.exact), (lengths, list(segment.checked), segment.exact)
            call = self.editor.ours(OPERATORS, "jagged_offsets", bound, *arguments)
            call.meta["bags"] = segment.count * segment.rows
            self._jagged[key] = call
        return self._jagged[key]


def _table_name(table: Node) -> str:
    slot = table.meta.get("state")
    return f"{slot.module}.{slot.name}".lstrip(".") if slot is not None else table.name
