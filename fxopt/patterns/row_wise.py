"""Whether a graph computes row b of its outputs from row b of its inputs: then a batch may be padded.

Jagged ids count as rows of their bag: ids that only embedding columns read, by offsets that are inputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.kernels.columns.plan import Plan
from fxopt.shape.sizes import Size, expression, same, static

aten = torch.ops.aten
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
        outputs: for each output, how many rows it has for one of the batch; 0: it does not depend on the batch.
    """

    rows: set[int] = field(default_factory=set)
    offsets: dict[int, int] = field(default_factory=dict)
    last_offsets: set[int] = field(default_factory=set)
    ids: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)


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


class _Analysis:
    def __init__(self, graph: Graph, plan_of: PlanOf) -> None:
        self.graph, self.plan_of = graph, plan_of
        self.placeholders = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
        (self.output,) = graph.find_nodes(op="output")
        self.found = Rows()
        self.batch = self._batch()
        self.symbols = expression(self.batch).free_symbols
        self.has_rows: dict[Node, bool] = {}

    def result(self) -> Rows:
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.has_rows[node] = self._visit(node)
            elif node.op not in ("placeholder", "get_attr", "output"):
                raise NotRowWise(node, "an opaque call")
            else:
                self.has_rows[node] = node.op == "placeholder" and self._input(node)
        for node in self.output.args[0]:  # type: ignore[union-attr]
            self.found.outputs.append(self._multiple(node.meta["val"]) if self.has_rows[node] else 0)
        return self.found

    def _batch(self) -> Size:
        """The size that all rows count: of an input where the rows of an output are a multiple of it."""
        for node in self.output.args[0]:  # type: ignore[union-attr]
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dim() and static(value.shape[0]) is None:
                firsts = [n.meta["val"].shape[0] for n in self.placeholders if _is_sized(n)]
                return next((size for size in firsts if _times(value.shape[0], size)), value.shape[0])
        raise NotRowWise(self.output, "no output has a size of the batch")

    def _input(self, node: Node) -> bool:
        """Whether an input has B rows. Offsets and ids are seen to at the columns that read them."""
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not self._depends(value):
            return False
        if self._multiple(value) == 1:
            self.found.rows.add(self.placeholders[node])
            return True
        return False  # jagged: whoever reads it otherwise is stopped by `_visit`

    def _depends(self, value: Any) -> bool:
        return any(static(size) is None for size in value.shape)

    def _multiple(self, value: Tensor) -> int:
        """Rows for each of the batch, 0 for a tensor that has other sizes."""
        if value.dim() == 0 or self._batch_inside(value):
            return 0
        return _times(value.shape[0], self.batch)

    def _batch_inside(self, value: Tensor) -> bool:
        inner = (expression(size).free_symbols for size in value.shape[1:] if static(size) is None)
        return any(symbols & self.symbols for symbols in inner)

    def _visit(self, node: Node) -> bool:
        if _is_columns(node):
            return self._columns(node)
        sources = node.all_input_nodes
        values = [source.meta.get("val") for source in sources]
        for source, value in zip(sources, values, strict=True):
            jagged = isinstance(value, Tensor) and self._depends(value) and not self.has_rows[source]
            if jagged and not self._only_inner(value):  # type: ignore[arg-type]
                raise NotRowWise(node, f"reads {source.name}, whose sizes are none of the batch")
        sizes = [source for source, value in zip(sources, values, strict=True) if isinstance(value, torch.SymInt)]
        if not sizes and not any(self.has_rows[source] for source in sources):
            return False
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return False
        if sizes and node.target not in _BY_SIZE:
            raise NotRowWise(node, "computes with a size")
        tensors = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(t, Tensor) and self._multiple(t) for t in tensors):
            raise NotRowWise(node, "its result has not the rows of the batch")
        if not self._keeps_rows(node):
            raise NotRowWise(node, "may mix rows")
        return True

    def _only_inner(self, value: Tensor) -> bool:
        return not any(expression(s).free_symbols & self.symbols for s in value.shape if static(s) is None)

    def _keeps_rows(self, node: Node) -> bool:
        target: Any = node.target
        args: Any = node.args
        name = getattr(target, "name", str)()
        if target in _ALWAYS or target in _BY_SIZE or name in _OWN:
            return True
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            rank = node.meta["val"].dim()
            return all(n.meta["val"].dim() == rank for n in node.all_input_nodes if self.has_rows[n])
        if target in _FIRST_ONLY or name in _OWN_FIRST_ONLY:
            first = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            return all(n in first for n in node.all_input_nodes if self.has_rows[n])
        if target is aten.embedding.default:
            return not self.has_rows[args[0]] and self.has_rows[args[1]]
        if target is aten.matmul.default:
            left, right = args[0].meta["val"].dim(), args[1].meta["val"].dim()
            apart = self.has_rows[args[1]] and left == right and left > 2
            return self.has_rows[args[0]] and (apart or not self.has_rows[args[1]])
        if target is aten.permute.default:
            return bool(args[1][0] == 0)
        if target is aten.transpose.int:
            return self._without_first(node, args[1:])
        if target in _ADDED:
            bias, rows, weight = args[:3]
            flat = bias.meta["val"].dim() == 1 or self.has_rows[bias]
            return flat and self.has_rows[rows] and not self.has_rows[weight]
        if target in _DIM:
            position, default = _DIM[target]
            given = args[position] if len(args) > position else node.kwargs.get("dim", default)
            return self._without_first(node, given)
        return target in _NORMS and _NORMS[target](node)

    def _without_first(self, node: Node, dims: Any) -> bool:
        first: Any = node.args[0]
        rank = (first[0] if isinstance(first, list | tuple) else first).meta["val"].dim()
        rank += node.target in (aten.stack.default, aten.unsqueeze.default)
        every = list(dims) if isinstance(dims, list | tuple) else [dims]
        return bool(every) and all(isinstance(d, int) and d % rank != 0 for d in every)

    def _columns(self, node: Node) -> bool:
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
            if any(self.has_rows[tensors[t]] or self._depends(tensors[t].meta["val"]) for t in plain):
                raise NotRowWise(node, "boundaries of a size that changes")
        if ids & others or ids & bags.keys() or others & bags.keys():
            raise NotRowWise(node, "a tensor that is ids of bags and something else")
        for tensor in (tensors[number] for number in others):
            if not self.has_rows[tensor] and self._depends(tensor.meta["val"]):
                raise NotRowWise(node, f"reads {tensor.name}, which has not the rows of the batch")
        for number, (cut, include_last) in bags.items():
            self._offsets(node, tensors[number], tensors[cut], include_last)  # type: ignore[index]
        for number in ids:
            self._ids(node, tensors[number])  # type: ignore[index]
        if not all(self._multiple(value) for value in node.meta["val"]):
            raise NotRowWise(node, "an output has not the rows of the batch")
        return True

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


def _is_sized(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() > 0 and static(value.shape[0]) is None


def _times(size: Size, batch: Size) -> int:
    """The constant c of size = c * batch, else 0."""
    if same(size, batch):
        return 1
    times = sympy.cancel(expression(size) / expression(batch))
    return int(times) if times.is_Integer and times > 0 else 0


def _is_columns(node: Node) -> bool:
    """By its name: the operator is defined where the first model needs it."""
    return getattr(node.target, "name", str)() == "fxopt::columns"


def _layer_norm(node: Node) -> bool:
    return node.args[0].meta["val"].dim() > len(node.args[1])  # type: ignore[union-attr,arg-type]


def _eval_norm(node: Node) -> bool:
    return node.args[5] is False


# Operators whose rows cannot mix where the result has the rows of the batch.
_ALWAYS = {
    aten.bmm.default, aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype,
    aten.to.dtype_layout, aten.to.device, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.flatten.using_ints, aten.expand.default, aten.alias.default, aten.lift_fresh_copy.default,
    aten.scaled_dot_product_attention.default, aten.tril.default, aten.triu.default, getitem,
}  # fmt: skip

# Operators that may read a size: of the result, as the checks of its shape see.
_BY_SIZE = {
    aten.view.default, aten.reshape.default, aten.expand.default, aten._unsafe_view.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.zeros.default, aten.ones.default, aten.full.default,
}  # fmt: skip
_FIRST_ONLY = {aten.linear.default, aten.mm.default, aten.t.default}
_ADDED = {aten.addmm.default, aten._addmm_activation.default}
# Operators along a dim, which must not be the first: position of the argument, and its default.
_DIM: Mapping[Any, tuple[int, Any]] = {
    aten.cat.default: (1, 0), aten.stack.default: (1, 0), aten.softmax.int: (1, None), aten._softmax.default: (1, None),
    aten.log_softmax.int: (1, None), aten.sum.dim_IntList: (1, None), aten.mean.dim: (1, None),
    aten.amax.default: (1, ()), aten.amin.default: (1, ()),
    aten.select.int: (1, None), aten.slice.Tensor: (1, 0), aten.narrow.default: (1, None),
    aten.unsqueeze.default: (1, None), aten.squeeze.dim: (1, None), aten.unbind.int: (1, 0), aten.split.Tensor: (2, 0),
    aten.split_with_sizes.default: (2, 0), aten.index_select.default: (1, None), aten.gather.default: (1, None),
    aten.cumsum.default: (1, None), aten.max.dim: (1, None), aten.min.dim: (1, None), aten.topk.default: (2, -1),
}  # fmt: skip
_NORMS = {aten.layer_norm.default: _layer_norm, aten.batch_norm.default: _eval_norm}
_OWN = {"fxopt::dot_interaction", "fxopt::factorization_machine", "fxopt::gpu_dots"}
_OWN_FIRST_ONLY = {"fxopt::mlp", "fxopt::gpu_linear"}
