"""Embedding columns: ids > program > lookup > pooling, each found as one Column."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.core import Reject, Search
from fxopt.patterns.embedding_columns.index_program import IndexPrograms
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, itself, name_of
from fxopt.patterns.embedding_columns.layout import Layout, laid_out, layout_of, split_rows
from fxopt.patterns.embedding_columns.lookups import Lookup, find_lookup
from fxopt.patterns.embedding_columns.placed import Column, PerRow, Placed
from fxopt.patterns.embedding_columns.pooling import Pooled, find_pooled
from fxopt.patterns.jagged.segments import Segment, Segments
from fxopt.shape.calls import closure
from fxopt.shape.sizes import Size, product, shape_of, static, tensor_of


class Columns:
    """All columns of one graph, by anchor, and what nearly was one."""

    def __init__(self, search: Search) -> None:
        self.aliases = search.aliases
        self.segments = Segments(search.graph, self.aliases)
        self.programs = IndexPrograms(self.aliases, self.segments)
        self.rejects: list[Reject] = []
        self.found: dict[Node, Column] = {}
        self.copied: set[tuple[Node, Node]] = set()  # a collector's anchor, and that of a column which it copies
        self._inference = search.inference
        lookups = dict(self._lookups(search.graph))
        for node in search.graph.nodes:
            if node in lookups:
                self._add(Column(node, lookups[node], None))
            elif (pooled := find_pooled(node, lookups, self.programs.describe)) is not None:
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
        if edited := next(filter(self.aliases.edited, lookup.inside), None):
            return Reject(f"'{edited.name}' is edited in place", lookup.anchor)
        edited = self.programs.edited(self.programs.describe(lookup.ids))
        if edited is not None:
            return Reject(f"its ids are edited in place ('{edited.name}')", lookup.anchor)
        if static(shape_of(lookup.table)[1]) is None:
            return Reject("its table's dim is not fixed", lookup.anchor)
        if lookup.inference_only and not self._inference:
            return Reject(f"{lookup.inference_only}; optimized where gradients are off", lookup.anchor)
        return self._of_feature(lookup)

    def _of_feature(self, lookup: Lookup) -> Lookup:
        """The lookup, of all features' tensors where all that it reads is one feature's."""
        ids, bag = self.programs.describe(lookup.ids), lookup.bag
        segment = self.segments.of(ids.base) if ids.view.is_base and not ids.per_lane else None
        if segment is None or len(shape_of(segment.ids)) != 1 or self.aliases.edited(segment.lengths):
            return lookup
        if bag is None:  # a GPU would have to wait for the number of rows
            return lookup if lookup.table.meta["val"].is_cuda else replace(lookup, segment=segment)
        if bag.offsets is None or not self.segments.offsets_of(bag.offsets, segment):
            return lookup
        if bag.weights is None:
            return replace(lookup, segment=segment)
        weights = self.segments.of(bag.weights)
        if weights is None or (weights.lengths, weights.number) != (segment.lengths, segment.number):
            return lookup
        segment = replace(segment, checked=tuple(dict.fromkeys((*segment.checked, *weights.checked))))
        return replace(lookup, segment=segment, bag=replace(bag, weights=weights.ids))

    def _add(self, column: Column) -> None:
        pooled, bag = column.pooled, column.lookup.bag
        reads = [bag.offsets, bag.weights] if bag else []
        reads += [pooled.weights, pooled.divided_by] if pooled else []
        reads += [node for inner in column.interior for node in (inner, *inner.all_input_nodes)]
        edited = [node for node in reads if node is not None and self.aliases.edited(node)]
        edited += [node for value in self._per_row_values(pooled) if (node := self.programs.edited(value)) is not None]
        slow = "" if self._inference else _without_kernel(column)
        if edited:
            self.rejects.append(Reject(f"'{edited[0].name}' is edited in place", column.anchor))
        elif slow:
            self.rejects.append(
                Reject(f"no kernel has the gradient of {slow}; optimized where gradients are off", column.anchor)
            )
        else:
            self.found[column.anchor] = column

    def _per_row_values(self, pooled: Pooled | None) -> list[IndexValue]:
        if pooled is None:
            return []
        prefix = pooled.masking.prefix if pooled.masking else None
        values = [pooled.divisor, self.programs.describe(prefix.lengths) if prefix else None]
        return [value for value in values if value is not None]

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
        weights = self._weights(column, axes)
        divisor, lengths = self._divisor(column, rows), self._lengths(column, rows)
        for part in (weights, divisor, lengths):
            if isinstance(part, Reject):
                return part
        return Placed(column, ids, width, weights, divisor, lengths)  # type: ignore[arg-type]

    def _ids(self, column: Column, axes: int) -> Layout | None:
        node = column.lookup.ids
        if column.lookup.segment is not None:
            return self._of_segment(column.lookup.segment, self.programs.describe(node))
        if column.pooled and column.pooled.masking:
            value = column.pooled.masking.ids
            layout = laid_out(value, node, axes)
            return layout if layout is not None and layout.value is value else None
        value = self.programs.describe(node)
        if column.lookup.bag is None or column.lookup.bag.offsets is None:
            return layout_of(value, axes) or self._over_view(node, axes) or layout_of(itself(node), axes)
        return self._flat(value, node)

    def _over_view(self, node: Node, axes: int) -> Layout | None:
        value = self.programs.over_view(node)
        return None if value is None else layout_of(value, axes)

    def _flat(self, value: IndexValue, node: Node) -> Layout | None:
        layout = laid_out(value, node, 1)
        if layout is not None and (layout.value.per_lane or [part.dim for part in layout.rows] != [0]):
            layout = laid_out(itself(node), node, 1)  # a bag's flat positions count along the first dim
        return layout

    def _of_segment(self, segment: Segment, ids: IndexValue) -> Layout | None:
        """All features' ids, with what is done to them and then to those of the segment."""
        layout = self._flat(self.programs.describe(segment.ids), segment.ids)
        if layout is None:
            return None
        return replace(layout, value=replace(layout.value, program=layout.value.program + ids.program))

    def _weights(self, column: Column, axes: int) -> Layout | Reject | None:
        bag = column.lookup.bag
        node = bag.weights if bag else column.pooled.weights if column.pooled else None
        if node is None:
            return None
        flat = bag is not None and bag.offsets is not None
        layout = laid_out(self._view_only(node), node, 1 if flat else axes)
        if layout is not None and flat and len(layout.rows) > 1:
            layout = laid_out(itself(node), node, 1)
        if layout is None:
            return Reject("its weights have no plain layout; make them contiguous", column.anchor)
        return layout

    def _divisor(self, column: Column, rows: Size) -> PerRow | Reject | None:
        pooled = column.pooled
        if pooled is None or pooled.divisor is None or pooled.divided_by is None:
            return None
        if pooled.counted:
            count = pooled.divisor.base.meta["val"].dtype
            cast = (Step(Instr(Op.CAST, name_of(count))),) if count.is_floating_point else ()
            return PerRow(None, cast + pooled.divisor.program)
        found = self._per_row(pooled.divided_by, rows)
        return found or Reject("its divisor is not one value per row", column.anchor)

    def _lengths(self, column: Column, rows: Size) -> PerRow | Reject | None:
        masking = column.pooled.masking if column.pooled else None
        if masking is None or masking.prefix is None:
            return None
        found, first = self._per_row(masking.prefix.lengths, rows), masking.prefix.first
        if found is None or abs(first) >= _FAR:
            return Reject("its lengths are not one value per row", column.anchor)
        return replace(found, steps=found.steps + _shifted(first))

    def _per_row(self, node: Node, rows: Size) -> PerRow | None:
        axes, value = split_rows(shape_of(node), rows), self.programs.describe(node)
        layout = None if axes is None else laid_out(itself(node) if value.per_lane else value, node, axes)
        return None if layout is None or layout.lane is not None else PerRow(layout, layout.value.program)

    def _view_only(self, node: Node) -> IndexValue:
        """Weights and copies are read as they are: a view of a tensor, without a program."""
        value = self.programs.describe(node)
        return itself(node) if value.program else value

    def place_copy(self, node: Node, rows_axes: int) -> Layout | None:
        """A dense tensor that stands between columns, copied into the output."""
        if self.aliases.edited(node):
            return None
        value = self._view_only(node)
        if self.aliases.edited(value.base):
            return None
        return laid_out(value, node, rows_axes)


_FAR = 2**40  # beyond any number of lanes


def _shifted(first: int) -> tuple[Step, ...]:
    """l + first < n as l < n - first, which no n makes overflow."""
    if first == 0:
        return ()
    ops = ((Op.CAST, 0), (Op.CLAMP_MIN, -2 * _FAR), (Op.CLAMP_MAX, 2 * _FAR), (Op.ADD, -first))
    return tuple(Step(Instr(op, "int64", a)) for op, a in ops)


def _without_kernel(column: Column) -> str:
    """What of a column no kernel differentiates: its definition in PyTorch looks everything up once more. "": nothing.

    Training steps, batch 16 and 256, of two tables of 1000 x 16 to 100,000 x 16: with maxima 0.5x to 0.8x of eager,
    with a softmax over positions 0.4x to 0.9x, without 0.7x to 1.5x. Bags of learned weights are 0.6x to 3x, and stay.
    """
    pooled = column.pooled
    factors = [pooled.weights, pooled.divided_by] if pooled else []
    if column.mode == "max":
        return "maxima"
    return "learned weights" if any(map(_is_learned, filter(None, factors))) else ""


def _is_learned(factor: Node) -> bool:
    """Whether floats of the model's state are in it; no gradient flows through masks and ids."""

    def floats(node: Node) -> bool:
        value = tensor_of(node)
        return value is not None and value.is_floating_point()

    sources = closure([factor], lambda node: filter(floats, node.all_input_nodes))
    return any("state" in source.meta for source in sources)
