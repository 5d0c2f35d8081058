"""Embedding columns: ids > program > lookup > pooling, each found as one Column."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from fxopt.patterns.core import Reject
from fxopt.patterns.index_program import IndexPrograms
from fxopt.patterns.index_value import IndexValue
from fxopt.patterns.layout import Layout, laid_out, split_rows
from fxopt.patterns.lookups import Lookup, find_lookup
from fxopt.patterns.pooling import Pooled, find_pooled
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, product, shape_of, static
from fxopt.shape.views import View


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
        return (self.lookup.anchor,) if self.pooled else ()

    @property
    def dim(self) -> int:
        dim = static(shape_of(self.lookup.table)[1])
        assert dim is not None
        return dim


@dataclass(frozen=True)
class Placed:
    """A column with its tensors laid out for a number of rows: lane l's row lands at offset + l * D."""

    column: Column
    ids: Layout
    width: int | None
    weights: Layout | None = None
    divisor: Layout | None = None

    @property
    def reads(self) -> list[Node]:
        bag = self.column.lookup.bag
        layouts = [layout for layout in (self.ids, self.weights, self.divisor) if layout is not None]
        offsets = [bag.offsets] if bag and bag.offsets is not None else []
        return [self.column.lookup.table, *offsets, *(node for layout in layouts for node in layout.reads)]

    @property
    def is_plain(self) -> bool:
        """A lookup and nothing else: one operator in torch too."""
        return self.column.mode == "none" and not self.ids.value.program


class Columns:
    """All columns of one graph, by anchor, and what nearly was one."""

    def __init__(self, graph: Graph, aliases: Aliases, inference: bool) -> None:
        self.programs = IndexPrograms(aliases)
        self.aliases = aliases
        self.rejects: list[Reject] = []
        self.found: dict[Node, Column] = {}
        self._inference = inference
        lookups = dict(self._lookups(graph))
        for node in graph.nodes:
            if node in lookups:
                self._add(Column(node, lookups[node], None))
            elif (pooled := self._pooled(node, lookups)) is not None:
                self._add(Column(node, pooled.lookup, pooled))

    def _lookups(self, graph: Graph):  # type: ignore[no-untyped-def]
        for node in graph.nodes:
            lookup = find_lookup(node)
            if isinstance(lookup, Lookup):
                lookup = self._usable(lookup)
            if isinstance(lookup, Lookup):
                yield node, lookup
            elif lookup is not None:
                self.rejects.append(lookup)

    def _usable(self, lookup: Lookup) -> Lookup | Reject:
        if self.aliases.edited(lookup.table):
            return Reject("its table is edited in place in forward (max_norm does this)", lookup.anchor)
        edited = self.programs.edited(self.programs.describe(lookup.ids))
        if edited is not None:
            return Reject(f"its ids are edited in place ('{edited.name}')", lookup.anchor)
        if static(shape_of(lookup.table)[1]) is None:
            return Reject("its table's dim is not fixed", lookup.anchor)
        if lookup.inference_only and not self._inference:
            return Reject(f"{lookup.inference_only}; optimized where gradients are off", lookup.anchor)
        return lookup

    def _pooled(self, node: Node, lookups: dict[Node, Lookup]) -> Pooled | None:
        """A pooling as the kernel knows it: a bag leaves its padding out, nn.Embedding's is a row without gradient."""
        pooled = find_pooled(node, lookups)
        if pooled is None:
            return None
        lookup, reason = pooled.lookup, pooled.inference_only
        if lookup.padding is not None:
            reason = "its padding_idx row must get no gradient"
        if reason and not self._inference:
            self.rejects.append(Reject(f"{reason}; its pooling is optimized where gradients are off", pooled.anchor))
            return None
        return replace(pooled, lookup=replace(lookup, padding=None))

    def _add(self, column: Column) -> None:
        pooled, bag = column.pooled, column.lookup.bag
        reads = [bag.offsets, bag.weights] if bag else []
        reads += [pooled.weights, pooled.divisor] if pooled else []
        edited = [node for node in (*column.interior, *reads) if node is not None and self.aliases.edited(node)]
        if edited:
            self.rejects.append(Reject(f"'{edited[0].name}' is edited in place", column.anchor))
        else:
            self.found[column.anchor] = column

    def place(self, column: Column, rows: Size) -> Placed | Reject:
        """`column` laid out so that it fills `rows` rows."""
        axes = split_rows(column.rows_shape, rows)
        if axes is None:
            return Reject("its rows are not the rows of the tensor it is collected into", column.anchor)
        ids = self._ids(column, axes)
        if ids is None:
            return Reject("its ids have no layout with one or two row dims and one id dim", column.anchor)
        lanes = static(product(column.rows_shape[axes:]))
        width = column.dim * lanes if lanes is not None else None
        weights, divisor = self._weights(column, axes), self._divisor(column, rows)
        if isinstance(weights, Reject) or isinstance(divisor, Reject):
            return weights if isinstance(weights, Reject) else divisor  # type: ignore[return-value]
        return Placed(column, ids, width, weights, divisor)

    def _ids(self, column: Column, axes: int) -> Layout | None:
        value, node = self.programs.describe(column.lookup.ids), column.lookup.ids
        if column.lookup.bag is None or column.lookup.bag.offsets is None:
            return laid_out(value, node, axes)
        layout = laid_out(value, node, 1)
        if layout is not None and (len(layout.rows) > 1 or layout.value.per_lane):
            layout = laid_out(_itself(node), node, 1)  # a bag's flat positions count along one dim
        return layout

    def _weights(self, column: Column, axes: int) -> Layout | Reject | None:
        bag = column.lookup.bag
        node = bag.weights if bag else column.pooled.weights if column.pooled else None
        if node is None:
            return None
        layout = laid_out(self._view_only(node), node, 1 if bag else axes)
        if layout is None or (bag and len(layout.rows) > 1):
            return Reject("its weights have no plain layout; make them contiguous", column.anchor)
        return layout

    def _divisor(self, column: Column, rows: Size) -> Layout | Reject | None:
        node = column.pooled.divisor if column.pooled else None
        if node is None:
            return None
        axes = split_rows(shape_of(node), rows)
        layout = None if axes is None else laid_out(self._view_only(node), node, axes)
        return layout or Reject("its divisor is not one value per row", column.anchor)

    def _view_only(self, node: Node) -> IndexValue:
        """Weights and copies are read as they are: a view of a tensor, without a program."""
        value = self.programs.describe(node)
        return _itself(node) if value.program else value

    def place_copy(self, node: Node, rows_axes: int) -> Layout | None:
        """A dense tensor that stands between columns, copied into the output."""
        if self.aliases.edited(node):
            return None
        value = self._view_only(node)
        if self.aliases.edited(value.base):
            return None
        return laid_out(value, node, rows_axes)


def _itself(node: Node) -> IndexValue:
    return IndexValue(node, View.of(shape_of(node)))
