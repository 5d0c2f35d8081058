"""Whether a graph computes row b of its outputs from row b of its inputs (shape/rows.py): then a batch may be padded.

Jagged ids count as rows of their bag: ids that only embedding columns read, by offsets that are inputs too. Where the
offsets tell the end of each bag, ids may be padded also where a batch may not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.kernels.columns.plan import Plan
from fxopt.patterns.core import is_ours
from fxopt.shape import placements
from fxopt.shape.placements import FIXED, Placement, Placements, Unknown
from fxopt.shape.rows import ByRows
from fxopt.shape.sizes import expression, static

PlanOf = Callable[[Node], Plan]


@dataclass
class Rows:
    """How the inputs of a graph (placeholders by number) depend on the batch size B.

    A tensor "has rows" where its dim 0 is B, or B times a constant, row after row.

    Attributes:
        rows: inputs of B rows on dim 0.
        offsets: offsets of B entries, and the ids they cut: after B rows come the numbers of all ids.
        last_offsets: offsets of B + 1 entries; the last one repeats.
        ids: jagged inputs.
        outputs: for each output, how many rows it has for one of the batch; 0: it does not depend on the batch. Empty
            where nothing is padded but the ids.
    """

    rows: set[int] = field(default_factory=set)
    offsets: dict[int, int] = field(default_factory=dict)
    last_offsets: set[int] = field(default_factory=set)
    ids: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)

    @property
    def are_padded(self) -> bool:
        """Whether one graph may serve several batch sizes."""
        return bool(self.outputs)


@dataclass(frozen=True)
class NotRowWise(Exception):
    """Why not; `str()` names the node."""

    node: Node
    why: str

    def __str__(self) -> str:
        return f"{self.node.name}: {self.why}"


def row_wise(graph: Graph, plan_of: PlanOf) -> Rows:
    """How inputs become rows of outputs.

    Args:
        plan_of: the plan of a call of fxopt::columns.

    Raises:
        NotRowWise: some row of an output may depend on other rows.
    """
    return _Analysis(graph, plan_of).result()


def loose_ids(graph: Graph, plan_of: PlanOf) -> set[int]:
    """Inputs (placeholders by number) that are ids of bags, and nothing else, of which there may be any number."""
    loose, others = set[Node](), set[Node]()
    for node in filter(_is_columns, graph.nodes):
        tensors: Any = node.args[0]
        for column in plan_of(node).columns:
            parts = (column.divisor, column.lengths)
            sources = [part.source for part in parts if part is not None and part.source is not None]
            ids = [source for source in (column.source, column.weights) if source is not None]
            ends = column.bag is not None and column.bag.include_last and column.pool != "none"
            loose |= {tensors[source.tensor] for source in ids if ends and source.lane is None}
            others |= {tensors[source.tensor] for source in ids if not ends or source.lane is not None}
            others |= {tensors[source.tensor] for source in sources}
            others |= {tensors[instr.tensor] for instr in column.program if instr.tensor >= 0}
            others |= {tensors[column.bag.tensor]} if column.bag is not None else set()
    return {
        number
        for number, node in enumerate(graph.find_nodes(op="placeholder"))
        if node in loose - others and _is_sized(node) and all(_compares(user, node) for user in node.users)
    }


def _compares(user: Node, ids: Node) -> bool:
    """Whether it reads ids by bags, or compares their number alone."""
    return _is_columns(user) or (is_ours(user, "fxopt::jagged_offsets") and ids is not user.args[0])


class _Analysis:
    def __init__(self, graph: Graph, plan_of: PlanOf) -> None:
        self.graph, self.plan_of = graph, plan_of
        self.placeholders = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
        (self.output,) = graph.find_nodes(op="output")
        self.found = Rows()
        self.by_rows = ByRows(self._batch())
        self.known: Placements = {}

    def result(self) -> Rows:
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.known[node] = self._call(node)
            elif node.op not in ("placeholder", "get_attr", "output"):
                raise NotRowWise(node, "an opaque call")
            else:
                self.known[node] = self._input(node) if node.op == "placeholder" else FIXED
        self.found.outputs = [self._times(node) for node in self.output.args[0]]  # type: ignore[union-attr]
        return self.found

    def _batch(self) -> sympy.Expr:
        """The size that all rows count: of an input where the rows of an output are a multiple of it."""
        for node in self.output.args[0]:  # type: ignore[union-attr]
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dim() and static(value.shape[0]) is None:
                rows = expression(value.shape[0])
                firsts = [expression(n.meta["val"].shape[0]) for n in self.placeholders if _is_sized(n)]
                if not rows.free_symbols <= set[sympy.Basic]().union(*(size.free_symbols for size in firsts)):
                    raise NotRowWise(node, "its number of rows is none that the inputs tell")
                return next((size for size in firsts if sympy.cancel(rows / size).is_Integer), rows)
        raise NotRowWise(self.output, "no output has a size of the batch")

    def _input(self, node: Node) -> Placement | None:
        """B rows in front, or none. Offsets and ids are seen to at the columns that read them, and by nobody else."""
        place = self._of_shape(node.meta["val"])
        if place == placements.Rows(0):
            self.found.rows.add(self.placeholders[node])
        return None if isinstance(place, placements.Rows) and place != placements.Rows(0) else place

    def _of_shape(self, value: Any) -> Placement | None:
        try:
            return _counted(self.by_rows.of_shape(value))
        except Unknown:
            return None

    def _call(self, node: Node) -> Placement:
        if _is_columns(node):
            self._columns(node)
            return placements.Rows(0)
        for source in node.all_input_nodes:
            if self.known[source] is None:
                raise NotRowWise(node, f"reads {source.name}, whose sizes are none of the batch")
        try:
            return _counted(self.by_rows.of_call(node, self.known))
        except Unknown:
            raise NotRowWise(node, "may mix rows") from None

    def _times(self, output: Node) -> int:
        """Rows for each of the batch, 0 where there are none."""
        place = self.known[output]
        if not isinstance(place, placements.Rows):
            return 0
        if place.dim != 0:
            raise NotRowWise(output, "an output whose rows are not in front")
        return place.times

    def _has_rows(self, node: Node) -> bool:
        place = self.known[node]
        return isinstance(place, placements.Rows) and place.dim == 0

    def _columns(self, node: Node) -> None:
        """Ids and offsets of jagged columns, and everything else with B rows."""
        tensors: Any = node.args[0]
        plan = self.plan_of(node)
        bags, ids, others = dict[int, tuple[int, bool]](), set[int](), set[int]()
        for column in plan.columns:
            rows = {s.tensor for s in (column.source, column.weights) if s is not None}
            plain = {i.tensor for i in column.program if i.tensor >= 0}
            for part in (column.divisor, column.lengths):
                others |= {part.source.tensor} if part is not None and part.source is not None else set()
            if column.bag is None:
                others |= rows
                if not column.source.rows or column.source.rows[0] != 0:  # B first
                    raise NotRowWise(node, "a column whose rows are no rows of its tensor")
            else:
                if column.bag.segments != 1 or column.source.lane is not None:
                    raise NotRowWise(node, "offsets of several features")
                ids |= rows
                known = bags.setdefault(column.bag.tensor, (column.source.tensor, column.bag.include_last))
                if known != (column.source.tensor, column.bag.include_last):
                    raise NotRowWise(node, "offsets that cut several tensors")
            if any(self.known[tensors[t]] is not FIXED or _varies(tensors[t]) for t in plain):
                raise NotRowWise(node, "boundaries of a size that changes")
        if ids & others or ids & bags.keys() or others & bags.keys():
            raise NotRowWise(node, "a tensor that is ids of bags and something else")
        for tensor in (tensors[number] for number in others):
            if not self._has_rows(tensor) and _varies(tensor):
                raise NotRowWise(node, f"reads {tensor.name}, which has not the rows of the batch")
        for number, (cut, include_last) in bags.items():
            self._offsets(node, tensors[number], tensors[cut], include_last)  # type: ignore[index]
        for number in ids:
            self._ids(node, tensors[number])  # type: ignore[index]
        places = [self._of_shape(value) for value in node.meta["val"]]
        if not all(isinstance(place, placements.Rows) and place.dim == 0 for place in places):
            raise NotRowWise(node, "an output has not the rows of the batch")

    def _offsets(self, node: Node, offsets: Node, ids: Node, include_last: bool) -> None:
        number = self._alone(node, offsets)
        if include_last:
            self.found.last_offsets.add(number)
        elif self.found.offsets.setdefault(number, self.placeholders.get(ids, -1)) != self.placeholders.get(ids, -1):
            raise NotRowWise(node, "offsets that cut several tensors")
        self.found.rows.discard(number)

    def _ids(self, node: Node, ids: Node) -> None:
        self.found.ids.add(self._alone(node, ids))
        self.found.rows.discard(self.placeholders[ids])

    def _alone(self, node: Node, tensor: Node) -> int:
        if tensor not in self.placeholders or not all(map(_is_columns, tensor.users)):
            raise NotRowWise(node, f"bags of {tensor.name}, which is no input of columns alone")
        return self.placeholders[tensor]


def _counted(place: Placement) -> Placement:
    """A bucket's results are cut at known multiples of the batch."""
    if isinstance(place, placements.Rows) and place.known_times is None:
        raise Unknown
    return place


def _is_sized(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() > 0 and static(value.shape[0]) is None


def _varies(node: Node) -> bool:
    return any(static(size) is None for size in node.meta["val"].shape)


def _is_columns(node: Node) -> bool:
    return is_ours(node, "fxopt::columns")
