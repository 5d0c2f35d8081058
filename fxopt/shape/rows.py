"""Which dim of a value holds the rows of the batch, and whether row b of it depends on row b of the inputs alone.

What holds row by row may be computed some rows at a time. Nothing is guessed: an operator without a rule is unknown.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fxopt.shape.aliases import has_effects, is_random
from fxopt.shape.placements import COUNT, FIXED, Placement, Placements, Rows, Rowwise, Unknown, times_of
from fxopt.shape.row_rules import SHAPED, rule_of, rule_of_ours
from fxopt.shape.sizes import expression

aten = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def batch_symbol(values: Sequence[Any]) -> sympy.Symbol | None:
    """The symbol that most tensors have as their first size: the batch. None where every size is fixed."""
    leading = (expression(value.shape[0]) for value in values if isinstance(value, torch.Tensor) and value.dim())
    counts = Counter(size for size in leading if isinstance(size, sympy.Symbol))
    return counts.most_common(1)[0][0] if counts else None


class ByRows:
    """The placement of each node's value over a batch of this size."""

    def __init__(self, batch: sympy.Expr) -> None:
        self.batch = batch

    def of_shape(self, value: Any) -> Placement:
        """By its sizes alone: what an input is taken to be. Several tensors: rows, where one of them has rows."""
        if isinstance(value, tuple | list):
            return next((place for place in map(self.of_shape, value) if place != FIXED), FIXED)
        if not isinstance(value, torch.Tensor):
            return COUNT if isinstance(value, _SYMBOLIC) and self._counts(value) else FIXED
        dims = [dim for dim, size in enumerate(value.shape) if self._counts(size)]
        if not dims:
            return FIXED
        times = times_of(expression(value.shape[dims[0]]), self.batch)
        if len(dims) > 1 or times is None:
            raise Unknown
        return Rows(dims[0], times)

    def of_call(self, node: Node, known: Placements) -> Placement:
        """What a call returns (every tensor of it), from what is known of its inputs.

        Raises:
            Unknown: it mixes rows, edits memory, draws random numbers, or has no rule.
        """
        placements = {source: known[source] for source in node.all_input_nodes}
        if None in placements.values() or has_effects(node) or is_random(node):
            raise Unknown
        if all(placement == FIXED for placement in placements.values()):
            return FIXED
        if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            return self._number(node, placements)
        if node.target is operator.getitem:
            return self.of_shape(node.meta["val"])
        found = self._ruled(node, placements)
        values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        places = [self.of_shape(value) for value in values if isinstance(value, torch.Tensor)]
        if rule_of_ours(node) is None and any(place not in (found, FIXED) for place in places):
            raise Unknown  # each result of an operator of ours has rows of its own
        return found

    def _counts(self, size: Any) -> bool:
        return not isinstance(size, int) and bool(self.batch.free_symbols & expression(size).free_symbols)

    def _number(self, node: Node, placements: dict[Node, Any]) -> Placement:
        """Sizes, and what is computed from sizes; an item of a tensor with rows is neither."""
        if node.target is aten.sym_size.int or all(not isinstance(place, Rows) for place in placements.values()):
            return self.of_shape(node.meta["val"])
        raise Unknown

    def _ruled(self, node: Node, placements: dict[Node, Any]) -> Placement:
        rule = rule_of(node)
        if rule is None or (COUNT in placements.values() and rule not in SHAPED):
            raise Unknown
        return rule(Rowwise(node, placements, self.of_shape))


def rows_of(graph: Graph, symbol: sympy.Symbol, given: frozenset[Node] = frozenset()) -> Placements:
    """The placement of every node; None where the rows mix or nothing is known. Those `given` are taken as inputs."""
    by_rows = ByRows(symbol)
    known: Placements = {}
    for node in graph.nodes:
        try:
            if node.op == "call_function" and node not in given:
                known[node] = by_rows.of_call(node, known)
            else:
                known[node] = by_rows.of_shape(node.meta["val"]) if "val" in node.meta else None
        except Unknown:
            known[node] = None
    return known


def keeps_rows(graph: Graph) -> bool:
    """Whether the graph gives rows in front for rows in front."""
    batch = batch_symbol([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
    (output,) = graph.find_nodes(op="output")
    if batch is None:
        return False
    found = rows_of(graph, batch)
    sources = (found[node] for node in graph.find_nodes(op="placeholder"))
    return all(found[node] == Rows(0) for node in output.all_input_nodes) and all(
        place == Rows(0) or place == FIXED for place in sources
    )
