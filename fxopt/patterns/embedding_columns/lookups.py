"""Lookups: the spellings of `table[ids]`, with or without a bag around them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.fx import Node

from fxopt.patterns.core import Reject
from fxopt.patterns.jagged.segments import Segment
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import Size, is_tensor, same, shape_of, static, tensor_of

aten = torch.ops.aten
TABLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bag:
    """An EmbeddingBag's way of pooling. offsets None: every bag is one row of a 2-D id tensor."""

    mode: str
    offsets: Node | None
    include_last: bool = False
    weights: Node | None = None


@dataclass(frozen=True)
class Lookup:
    """anchor = table[ids], pooled by `bag` if there is one.

    ids: any integer tensor [...]; table [R, D]; anchor [..., D], or [B, D] with a bag.
    padding: the row whose gradient stays zero, and which a bag leaves out.
    wrap_negative: ids in [-R, -1] count from the end.
    runtime_error: torch raises RuntimeError for an id outside the table.
    inference_only: its gradient has a form (sparse, scaled by frequency) that only eager gives.
    inside: what is computed between ids and anchor.
    segment: the ids, and the bag's weights, are those of one feature among others.
    """

    anchor: Node
    table: Node
    ids: Node
    bag: Bag | None = None
    padding: int | None = None
    wrap_negative: bool = False
    runtime_error: bool = False
    inference_only: str = ""
    inside: tuple[Node, ...] = ()
    segment: Segment | None = None


def find_lookup(node: Node) -> Lookup | Reject | None:
    """The lookup whose result `node` is; None where it is none at all."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _embedding_bag(node)
    finder = _FINDERS.get(node.target)
    lookup = finder(node) if finder else None
    return _checked(lookup) if isinstance(lookup, Lookup) else lookup


def _checked(lookup: Lookup) -> Lookup | Reject:
    table, ids = tensor_of(lookup.table), tensor_of(lookup.ids)
    assert table is not None and ids is not None
    if table.dtype not in TABLE_DTYPES:
        return Reject(f"its table is {table.dtype}; expected one of fp32, fp64, fp16, bf16", lookup.anchor)
    if table.device.type not in ("cpu", "cuda") or table.layout != torch.strided:
        why = f"its table is a {table.layout} tensor on {table.device}; expected a strided one on CPU or CUDA"
        return Reject(why, lookup.anchor)
    return lookup


def _is_table(node: object) -> TypeGuard[Node]:
    return is_tensor(node) and len(shape_of(node)) == 2


def _is_ids(node: object) -> TypeGuard[Node]:
    tensor = tensor_of(node)
    return tensor is not None and not tensor.is_floating_point() and tensor.dtype not in (torch.bool, torch.uint8)


def _only_eager_grad(arguments: dict[str, object]) -> str:
    """Whether the table is frozen does not matter: it may be trained again after the capture."""
    if arguments["sparse"]:
        return "sparse=True asks for a sparse gradient"
    return "scale_grad_by_freq=True asks for a scaled gradient" if arguments["scale_grad_by_freq"] else ""


def _embedding(node: Node) -> Lookup | Reject | None:
    arguments = arguments_of(node)
    table, ids, padding = arguments["weight"], arguments["indices"], arguments["padding_idx"]
    if not _is_table(table) or not _is_ids(ids):
        return None
    assert isinstance(padding, int)
    padding = None if padding < 0 else padding
    return Lookup(node, table, ids, padding=padding, inference_only=_only_eager_grad(arguments))


def _embedding_bag(node: Node) -> Lookup | Reject | None:
    call, index = node.args
    if not isinstance(call, Node) or call.target not in (aten.embedding_bag.padding_idx, aten.embedding_bag.default):
        return None
    if index != 0:
        return None
    arguments = arguments_of(call)
    table, ids, offsets = arguments["weight"], arguments["indices"], arguments["offsets"]
    if not _is_table(table) or not _is_ids(ids) or not isinstance(offsets, Node):
        return None
    if any(user.args[1] != 0 for user in call.users):
        return Reject("its offset2bag, bag_size or max_indices output is used too", node)
    mode = ("sum", "mean", "max")[int(arguments["mode"])]  # type: ignore[call-overload]
    weights = arguments["per_sample_weights"]
    padding = arguments.get("padding_idx")
    assert padding is None or isinstance(padding, int)
    if padding is not None and padding < 0:
        rows = static(shape_of(table)[0])
        padding = None if rows is None else padding + rows
    bag = Bag(mode, offsets, bool(arguments["include_last_offset"]), weights if isinstance(weights, Node) else None)
    by_rows = padding is None and mode != "max"  # a bag's max passes over NaN, a row's does not
    rows_of = _rows_of_2d(ids, offsets) if by_rows else None
    weights_of = _2d_behind(bag.weights) if bag.weights else None
    if rows_of is not None and (bag.weights is None or weights_of is not None):
        ids, bag = rows_of, Bag(mode, None, weights=weights_of)
    grad = _only_eager_grad(arguments)
    return _checked(Lookup(node, table, ids, bag, padding, runtime_error=True, inference_only=grad))


def _rows_of_2d(ids: Node, offsets: Node) -> Node | None:
    """ids [B, L] behind F.embedding_bag's own `ids.reshape(-1)` with offsets arange(0, B * L, L)."""
    rows = _2d_behind(ids)
    if rows is None or offsets.target is not aten.arange.start_step:
        return None
    start, stop, step = (_size(value) for value in (*offsets.args, 1)[:3])
    B, L = shape_of(rows)
    return rows if start == 0 and same(step, L) and same(stop, B * L) else None


def _2d_behind(flat: Node) -> Node | None:
    """What F.embedding_bag has made one row of ids or weights of, where it was a matrix."""
    source = flat.args[0] if flat.target in (aten.reshape.default, aten.view.default) else None
    return source if isinstance(source, Node) and len(shape_of(source)) == 2 else None


def _size(value: object) -> Size:
    return value.meta["val"] if isinstance(value, Node) else value  # type: ignore[return-value]


def _index(node: Node) -> Lookup | Reject | None:
    table, indices = node.args[:2]
    if not _is_table(table) or not isinstance(indices, list | tuple) or len(indices) != 1 or not _is_ids(indices[0]):
        return None
    return Lookup(node, table, indices[0], wrap_negative=True) if _is_weight(table) else None


def _index_select(node: Node) -> Lookup | Reject | None:
    table, dim, ids = node.args[:3]
    if not _is_table(table) or dim not in (0, -2) or not _is_ids(ids):
        return None
    return Lookup(node, table, ids) if _is_weight(table) else None


def _is_weight(table: Node) -> bool:
    """Indexing counts as a lookup only into state or a constant: `x[order]` of an activation is not a column."""
    return table.op in ("placeholder", "get_attr") and static(shape_of(table)[0]) is not None


def _one_hot(node: Node) -> Lookup | Reject | None:
    """one_hot(ids, R) @ table."""
    hot, table = node.args[:2]
    if not _is_table(table) or not isinstance(hot, Node):
        return None
    inside = [hot]
    while hot.target in (aten.to.dtype, aten._to_copy.default, aten.type_as.default) and isinstance(hot.args[0], Node):
        hot = hot.args[0]
        inside.append(hot)
    if hot.target is not aten.one_hot.default or not isinstance(hot.args[0], Node):
        return None
    if hot.args[0].meta["val"].dtype is not torch.int64:
        return Reject("one_hot takes int64 ids only", node)
    classes = hot.args[1] if len(hot.args) > 1 else -1
    if not isinstance(classes, int) or not same(shape_of(table)[0], classes):
        return Reject("one_hot without num_classes reads the ids first; give it the table's number of rows", node)
    return Lookup(node, table, hot.args[0], runtime_error=True, inside=tuple(inside))


_FINDERS: dict[object, Callable[[Node], Lookup | Reject | None]] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.matmul.default: _one_hot,
    aten.mm.default: _one_hot,
}
