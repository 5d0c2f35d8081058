"""Which dim of a value holds the rows of the batch, and whether row b of it depends on row b of the inputs alone.

What holds row by row may be computed some rows at a time. Nothing is guessed: an operator without a rule is unknown.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxopt.shape.aliases import has_effects, is_random
from fxopt.shape.calls import arguments_of, packet_of
from fxopt.shape.sizes import expression, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Row b takes the indices [b * times, (b + 1) * times) of `dim`."""

    dim: int
    times: int = 1


@dataclass(frozen=True)
class Fixed:
    """The same for all rows."""


@dataclass(frozen=True)
class Count:
    """A number that was computed from the number of rows; it may only shape tensors."""


class Unknown(Exception):
    """Not row by row, or no rule says so."""


Placement = Rows | Fixed | Count
Placements = dict[Node, Placement | None]
FIXED, COUNT = Fixed(), Count()


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
            return COUNT if isinstance(value, torch.SymInt) and self._counts(value) else FIXED
        dims = [dim for dim, size in enumerate(value.shape) if self._counts(size)]
        if not dims:
            return FIXED
        times = sympy.cancel(expression(value.shape[dims[0]]) / self.batch)
        if len(dims) > 1 or not isinstance(times, sympy.Integer):
            raise Unknown
        return Rows(dims[0], int(times))

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
        if _rule_of_ours(node) is None and any(place not in (found, FIXED) for place in places):
            raise Unknown  # each result of an operator of ours has rows of its own
        return found

    def _counts(self, size: int | torch.SymInt) -> bool:
        return not isinstance(size, int) and bool(self.batch.free_symbols & expression(size).free_symbols)

    def _number(self, node: Node, placements: dict[Node, Any]) -> Placement:
        """Sizes, and what is computed from sizes; an item of a tensor with rows is neither."""
        if node.target is aten.sym_size.int or all(not isinstance(place, Rows) for place in placements.values()):
            return self.of_shape(node.meta["val"])
        raise Unknown

    def _ruled(self, node: Node, placements: dict[Node, Any]) -> Placement:
        operation = Rowwise(node, placements, self)
        rule = RULES.get(packet_of(node)) if isinstance(node.target, OpOverload) else None
        if rule is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            rule = _pointwise
        rule = rule or _rule_of_ours(node)
        if rule is None or (COUNT in placements.values() and rule not in _SHAPED):
            raise Unknown
        return rule(operation)


class Rowwise:
    """One call for its rule: arguments by their names, and where their rows are."""

    def __init__(self, node: Node, placements: dict[Node, Any], by_rows: ByRows) -> None:
        self.node, self.placements = node, placements
        self.arguments = arguments_of(node) if isinstance(node.target, OpOverload) else {}
        value = node.meta["val"] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"][0]
        self.shape, self.by_sizes = tuple(value.shape), by_rows.of_shape(value)

    def rank(self, source: Node) -> int:
        return len(shape_of(source))

    def rows(self, source: Any) -> Rows | None:
        """None for what is no tensor, and for a tensor that all rows share."""
        found = self.placements.get(source) if isinstance(source, Node) else None
        return found if isinstance(found, Rows) else None

    def only(self, name: str) -> tuple[Node, Rows]:
        """The one argument with rows."""
        source: Any = self.arguments[name]
        others = [found for found in self.node.all_input_nodes if found is not source and self.rows(found)]
        found = self.rows(source)
        if others or found is None:
            raise Unknown
        return source, found

    def dims(self, name: str, rank: int) -> list[int]:
        named: Any = self.arguments.get(name)
        if named is None or named == []:
            return list(range(rank))
        return [dim % rank for dim in (named if isinstance(named, Sequence) else [named])]


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


def _agreed(found: Iterable[Rows]) -> Rows:
    different = set(found)
    if len(different) != 1:
        raise Unknown
    return different.pop()


def _pointwise(call: Rowwise) -> Rows:
    """Operands are aligned at their last dims. One whose rows meet another's single element would spread them."""
    aligned = []
    for source in call.node.all_input_nodes:
        if found := call.rows(source):
            aligned.append(replace(found, dim=found.dim + len(call.shape) - call.rank(source)))
    return _agreed(aligned)


def _first_dims(call: Rowwise) -> Rows:
    """All that has rows has them in front; row b of a result may be several of its rows, one after the other."""
    found = _agreed(place for place in call.placements.values() if isinstance(place, Rows))
    if found != Rows(0) or not isinstance(call.by_sizes, Rows) or call.by_sizes.dim != 0:
        raise Unknown
    return call.by_sizes


def _reshape(call: Rowwise) -> Rows:
    """The same memory order: the dims in front of the rows stay as they are."""
    source, found = call.only("self")
    before = shape_of(source)
    if list(map(expression, call.shape[: found.dim])) != list(map(expression, before[: found.dim])):
        raise Unknown
    symbols = expression(before[found.dim]).free_symbols
    size = call.shape[found.dim] if found.dim < len(call.shape) else 0
    times = expression(size) / expression(before[found.dim]) * found.times
    if not expression(size).free_symbols & symbols or not isinstance(times, sympy.Integer):
        raise Unknown
    return Rows(found.dim, int(times))


def _same(call: Rowwise) -> Rows:
    return call.only("self")[1]


def _along(call: Rowwise) -> Rows:
    """Works along `dim`, which stays."""
    source, found = call.only("self")
    if found.dim in call.dims("dim", call.rank(source)):
        raise Unknown
    return found


def _without(call: Rowwise) -> Rows:
    """`dim` goes, or becomes 1."""
    source, found = call.only("self")
    gone = call.dims("dim", call.rank(source))
    if found.dim in gone:
        raise Unknown
    if len(call.shape) == call.rank(source):
        return found
    return replace(found, dim=found.dim - sum(dim < found.dim for dim in gone))


def _unsqueeze(call: Rowwise) -> Rows:
    _, found = call.only("self")
    dim = call.dims("dim", len(call.shape))[0]
    return replace(found, dim=found.dim + (dim <= found.dim))


def _permute(call: Rowwise) -> Rows:
    source, found = call.only("self")
    return replace(found, dim=call.dims("dims", call.rank(source)).index(found.dim))


def _transpose(call: Rowwise) -> Rows:
    source, found = call.only("self")
    rank = call.rank(source)
    (first,), (second,) = (call.dims(name, rank) for name in ("dim0", "dim1"))
    return replace(found, dim={first: second, second: first}.get(found.dim, found.dim))


def _expand(call: Rowwise) -> Rows:
    if not call.rows(call.arguments["self"]):
        return _made(call)
    source, found = call.only("self")
    return replace(found, dim=found.dim + len(call.shape) - call.rank(source))


def _cat(call: Rowwise) -> Rows:
    found = _agreed(place for place in call.placements.values() if isinstance(place, Rows))
    tensors: Any = call.arguments["tensors"]
    if call.node.target is aten.stack.default:
        dim = call.dims("dim", len(call.shape))[0]
        parts, found = [call.rows(tensor) for tensor in tensors], replace(found, dim=found.dim + (dim <= found.dim))
    else:
        parts = [call.rows(tensor) for tensor in tensors]
        if found.dim in call.dims("dim", len(call.shape)):
            raise Unknown
    if None in parts:  # a part that all rows share has as many of them as there were
        raise Unknown
    return found


def _linear(call: Rowwise) -> Rows:
    source, found = call.only("input")
    if found.dim == call.rank(source) - 1:
        raise Unknown
    return found


def _matmul(call: Rowwise) -> Rows:
    """[.., M, K] x [.., K, N]: rows in the batch dims of both or of one, or in M."""
    left, right = call.arguments.get("self"), call.arguments.get("mat2", call.arguments.get("other"))
    if not isinstance(left, Node) or not isinstance(right, Node) or min(call.rank(left), call.rank(right)) < 2:
        raise Unknown
    aligned = []
    for source, summed in ((left, 1), (right, 2)):
        if found := call.rows(source):
            if call.rank(source) - found.dim == summed:
                raise Unknown
            aligned.append(replace(found, dim=found.dim + len(call.shape) - call.rank(source)))
    if any(call.rows(source) for source in call.node.all_input_nodes if source not in (left, right)):
        raise Unknown
    found = _agreed(aligned)
    if found.dim == len(call.shape) - 2 and call.rows(right):
        raise Unknown
    return found


def _addmm(call: Rowwise) -> Rows:
    _, found = call.only("mat1")
    if found.dim != 0:
        raise Unknown
    return found


def _looked_up(call: Rowwise) -> Rows:
    return call.only("indices")[1]


def _selected(call: Rowwise) -> Rows:
    """index_select(x, dim, index): rows of x beside `dim`, or rows of ids that take from what all share."""
    if call.rows(call.arguments["index"]):
        _, found = call.only("index")
        return replace(found, dim=call.dims("dim", len(call.shape))[0])
    return _along(call)


def _indexed(call: Rowwise) -> Rows:
    """x[:, i, j]: neighbouring indices that all rows share, beside the rows."""
    _, found = call.only("self")
    indices: Any = call.arguments["indices"]
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if found.dim in given or given[-1] - given[0] != len(given) - 1:
        raise Unknown
    if found.dim < given[0]:
        return found
    return replace(found, dim=found.dim - len(given) + max(call.rank(indices[dim]) for dim in given))


def _padded(call: Rowwise) -> Rows:
    source, found = call.only("self")
    amounts: Any = call.arguments["pad"]
    if found.dim >= call.rank(source) - len(amounts) // 2:
        raise Unknown
    return found


def _one_hot(call: Rowwise) -> Rows:
    """With the number of classes given; otherwise the largest id of all rows decides."""
    classes: Any = call.arguments["num_classes"]
    if isinstance(classes, Node) or classes < 0:
        raise Unknown
    return _same(call)


def _gathered(call: Rowwise) -> Rows:
    found = _agreed(place for place in call.placements.values() if isinstance(place, Rows))
    both = call.rows(call.arguments["self"]) and call.rows(call.arguments["index"])
    if not both or found.dim in call.dims("dim", len(call.shape)):
        raise Unknown
    return found


def _triangle(call: Rowwise) -> Rows:
    source, found = call.only("self")
    if found.dim >= call.rank(source) - 2:
        raise Unknown
    return found


def _batch_norm(call: Rowwise) -> Rows:
    source, found = call.only("input")
    training: Any = call.arguments["training"]
    if training or found.dim == 1 or call.rank(source) < 2:
        raise Unknown
    return found


def _layer_norm(call: Rowwise) -> Rows:
    source, found = call.only("input")
    normalized: Any = call.arguments["normalized_shape"]
    if found.dim >= call.rank(source) - len(normalized):
        raise Unknown
    return found


def _images(call: Rowwise) -> Rows:
    """Convolutions and poolings of [B, C, ..] by weights that all rows share."""
    name = "input" if "input" in call.arguments else "self"
    source, found = call.only(name)
    channels = 3 if "1d" in str(call.node.target) else 4
    if found != Rows(0) or call.rank(source) != channels:
        raise Unknown
    return found


def _attention(call: Rowwise) -> Rows:
    names = ("query", "key", "value", "attn_mask")
    found = _agreed(place for name in names if (place := call.rows(call.arguments.get(name))))
    if found != Rows(0) or not all(call.rows(call.arguments[name]) for name in names[:3]):
        raise Unknown
    mask = call.arguments.get("attn_mask")
    if isinstance(mask, Node) and call.rows(mask) and call.rank(mask) != len(call.shape):
        raise Unknown
    return found


def _einsum(call: Rowwise) -> Rows:
    """The letter of the rows is that of no other dim, and of the result."""
    equation: Any = call.arguments["equation"]
    tensors: Any = call.arguments["tensors"]
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        raise Unknown
    operands = [(term, call.rows(tensor)) for term, tensor in zip(terms.split(","), tensors, strict=True)]
    found = _agreed(replace(place, dim=0) for _, place in operands if place)
    letters = {term[place.dim] for term, place in operands if place}
    others = {letter for term, place in operands for dim, letter in enumerate(term) if not place or dim != place.dim}
    if len(letters) != 1 or not letters <= set(result) or letters & others:
        raise Unknown
    return replace(found, dim=result.index(letters.pop()))


def _chain(call: Rowwise) -> Rows:
    """Linear layers over the last dim of the inputs."""
    inputs, state = call.node.args[:2]
    found = _agreed(place for source in inputs if (place := call.rows(source)))  # type: ignore[union-attr]
    if any(call.rows(source) is None for source in inputs) or any(map(call.rows, state)):  # type: ignore[union-attr,arg-type]
        raise Unknown
    if found.dim >= len(call.shape) - 1:
        raise Unknown
    return found


def _by_axes(call: Rowwise) -> Rows:
    """meta["axes"]: (dims of the arguments, dims of the results) along which it works index by index; None: in none."""
    sources: list[Node] = []
    map_arg(call.node.args, sources.append)
    places = list(map(call.rows, sources))
    found = _agreed(replace(place, dim=0) for place in places if place)
    for before, after in call.node.meta.get("axes", ()):
        if list(before) == [place and place.dim for place in places]:
            return replace(found, dim=after[0])
    raise Unknown


def _made(call: Rowwise) -> Rows:
    """zeros(B, 3): every row the same, as many as the sizes say."""
    if isinstance(call.arguments.get("fill_value"), Node) or not isinstance(call.by_sizes, Rows):
        raise Unknown
    return call.by_sizes


def _bucketized(call: Rowwise) -> Rows:
    return call.only("self")[1]


def _named(names: str, rule: Callable[[Rowwise], Rows]) -> dict[Any, Callable[[Rowwise], Rows]]:
    return {getattr(aten, name): rule for name in names.split()}


RULES: dict[Any, Callable[[Rowwise], Rows]] = {
    **_named("reshape view _unsafe_view flatten unflatten", _reshape),
    **_named("contiguous clone alias detach to _to_copy lift_fresh_copy", _same),
    **_named("softmax _softmax log_softmax _log_softmax cumsum slice narrow sort topk split split_with_sizes chunk "
             "unsafe_split unsafe_chunk", _along),
    **_named("sum mean amax amin max min var std prod logsumexp any all argmax argmin select squeeze unbind", _without),
    **_named("unsqueeze", _unsqueeze),
    **_named("permute", _permute),
    **_named("transpose", _transpose),
    **_named("expand", _expand),
    **_named("cat stack", _cat),
    **_named("one_hot", _one_hot),
    **_named("index", _indexed),
    **_named("pad constant_pad_nd", _padded),
    **_named("linear", _linear),
    **_named("matmul bmm mm", _matmul),
    **_named("addmm _addmm_activation", _addmm),
    **_named("embedding", _looked_up),
    **_named("index_select", _selected),
    **_named("gather", _gathered),
    **_named("tril triu", _triangle),
    **_named("batch_norm", _batch_norm),
    **_named("layer_norm", _layer_norm),
    **_named("conv1d conv2d max_pool1d max_pool2d avg_pool1d avg_pool2d", _images),
    **_named("einsum", _einsum),
    **_named("scaled_dot_product_attention", _attention),
    **_named("zeros ones full empty new_zeros new_ones new_full zeros_like ones_like full_like", _made),
    **_named("bucketize", _bucketized),
}  # fmt: skip
_SHAPED = (_reshape, _expand, _made)

# Our own operators that work row by row; where it depends on their arguments meta["rowwise"] or meta["axes"] says so.
_OURS: dict[str, Callable[[Rowwise], Rows]] = {
    **dict.fromkeys(
        ("fxopt::towers", "fxopt::dot_interaction", "fxopt::pair_sum", "fxopt::pair_attention", "fxopt::k_largest",
         "fxopt::compressed_interaction", "fxopt::target_attention", "fxopt::pointwise", "fxopt::compressed_linear",
         "fxopt::pair_select", "fxopt::gpu_dots", "fxopt::gpu_linear"),
        _first_dims,
    ),
    "fxopt::mlp": _chain,
    "fxopt::attention": _by_axes,
}  # fmt: skip


def _rule_of_ours(node: Node) -> Callable[[Rowwise], Rows] | None:
    """Of an operator or a function of ours that works row by row."""
    known = _OURS.get(node.target._schema.name) if isinstance(node.target, OpOverload) else None
    return known or (_first_dims if node.meta.get("rowwise") else None)
