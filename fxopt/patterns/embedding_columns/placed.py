"""One embedding column, and where the rows of a call find its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxopt.patterns.embedding_columns.index_value import Step
from fxopt.patterns.embedding_columns.layout import Layout
from fxopt.patterns.embedding_columns.lookups import Lookup
from fxopt.patterns.embedding_columns.pooling import Pooled
from fxopt.shape.sizes import Size, shape_of, static


@dataclass(frozen=True)
class Column:
    """One embedding column of the graph.

    rows_shape: the axes that enumerate rows; the anchor is [*rows_shape, D], with singleton axes where torch kept them.
    """

    anchor: Node
    lookup: Lookup
    pooled: Pooled | None

    @property
    def mode(self) -> str:
        if self.lookup.bag is not None:
            return self.lookup.bag.mode
        return self.pooled.mode if self.pooled else "none"

    @property
    def rows_shape(self) -> tuple[Size, ...]:
        if self.lookup.bag is not None:
            return shape_of(self.lookup.anchor)[:1]
        shape = shape_of(self.lookup.ids)
        return shape[:-1] if self.pooled else shape

    @property
    def interior(self) -> tuple[Node, ...]:
        """What the replacement computes too: the values no in-place edit may touch."""
        return (self.lookup.anchor, *self.pooled.inner) if self.pooled else ()

    @property
    def dim(self) -> int:
        dim = static(shape_of(self.lookup.table)[1])
        assert dim is not None
        return dim


@dataclass(frozen=True)
class PerRow:
    """One value a row: `steps` on the layout's value, or where that is None on the number of lanes that count."""

    layout: Layout | None
    steps: tuple[Step, ...]

    @property
    def reads(self) -> list[Node]:
        base = [] if self.layout is None else [self.layout.value.base]
        return base + [step.operand for step in self.steps if step.operand is not None]


@dataclass(frozen=True)
class Placed:
    """A column with its tensors laid out for a number of rows: lane l's row lands at offset + l * D."""

    column: Column
    ids: Layout
    width: int | None
    weights: Layout | None = None
    divisor: PerRow | None = None
    lengths: PerRow | None = None

    @property
    def reads(self) -> list[Node]:
        bag, segment = self.column.lookup.bag, self.column.lookup.segment
        layouts = [read for read in (self.ids, self.weights, self.divisor, self.lengths) if read is not None]
        offsets = [bag.offsets] if bag and bag.offsets is not None else []
        offsets = [segment.lengths, *segment.checked] if segment else offsets
        return [self.column.lookup.table, *offsets, *(node for layout in layouts for node in layout.reads)]

    @property
    def is_plain(self) -> bool:
        """A lookup and nothing else: one operator in torch too."""
        return self.column.mode == "none" and not self.ids.value.program
