"""The ids of one feature, among those of many features that lie back to back (TorchRec's KeyedJaggedTensor)."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from fxopt.patterns.jagged.cuts import cut_of, parts_of
from fxopt.patterns.jagged.sums import Before, Sums
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import shape_of, tensor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Segment:
    """Feature `number` of `count`, which have `rows` bags each: a part of `ids` [N] by their `lengths` [count * rows].

    checked: the tensors with a row for each id that the model cuts by these lengths, as it does `ids`.
    exact: the model itself asks that they have as many rows as the lengths say, and not more.
    """

    ids: Node
    lengths: Node
    number: int
    count: int
    rows: sympy.Expr
    checked: tuple[Node, ...]
    exact: bool


class Segments:
    """Of one graph."""

    def __init__(self, graph: Graph, aliases: Aliases) -> None:
        self._sums = Sums(graph, aliases)
        self._found: dict[Node, Segment | None] = {}
        self._splits: dict[sympy.Expr, dict[Node, None]] = {}
        for node in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
            parts = parts_of(node)
            if parts is not None and parts.dim == 0:
                self._splits.setdefault(self._sums.number(parts.end), {})[parts.source] = None

    def of(self, node: Node) -> Segment | None:
        """The feature whose ids, or weights of ids, a 1-D tensor holds."""
        if node not in self._found:
            self._found[node] = self._segment(node)
        return self._found[node]

    def offsets_of(self, node: Node, segment: Segment) -> bool:
        """Whether a tensor holds where the segment's bags begin, counted from its first id on."""
        number, bag = self._sums.lengths.index(segment.lengths), sympy.Symbol("bag", integer=True)
        first = segment.number * segment.rows
        expected = Before(number, first + bag) - Before(number, first)
        return self._sums.at_bag(node, bag) == sympy.expand(expected)

    def _segment(self, node: Node) -> Segment | None:
        cut = cut_of(node) if tensor_of(node) is not None and len(shape_of(node)) == 1 else None
        if cut is None:
            return None
        begin, end = self._sums.number(cut.begin), self._sums.number(cut.end)
        if not isinstance(end, Before) or not (
            begin == 0 or (isinstance(begin, Before) and begin.args[0] == end.args[0])
        ):
            return None
        number, last = end.args
        first = begin.args[1] if begin != 0 else sympy.Integer(0)
        rows = sympy.expand(last - first)
        at, number = sympy.cancel(first / rows), int(number)
        counts = [sympy.cancel(bags / rows) for bags in self._sums.bags(number)]
        count = next((int(count) for count in counts if count.is_Integer), 0)
        if not (at.is_Integer and 0 <= at < count):
            return None
        whole = self._splits.get(Before(number, count * rows), {}) if cut.is_part else {}
        checked, exact = (tuple(whole), True) if cut.source in whole else ((cut.source,), False)
        return Segment(cut.source, self._sums.lengths[number], int(at), count, rows, checked, exact)
