"""Pooling of padded sequences: sum, mean and max over the lookups of one row, plain, masked or weighted.

The spellings, for rows [B, L, D] = table[ids], mask [B, L, 1] (or repeated over D) and length [B, 1]:

    rows.sum(1)    rows.mean(1)    rows.amax(1)    rows.max(1).values
    (rows * mask).sum(1), .mean(1) torch.bmm(mask, rows)  with mask [B, 1, L]
    rows.masked_fill(~mask, 0).sum(1)              torch.where(mask, rows, 0).sum(1)
    rows.masked_fill(~mask, -1e9).amax(1)          (rows - (1 - mask) * 1e9).max(1).values
    any sum / length    any sum / (mask.sum(1) + 1e-8)    any sum / mask.sum(1).clamp(min=1)

A mask of ids or lengths (masks.py) becomes part of the pooling; any other factor, a softmax over scores filled with
-1e9 too, is a weight per id. Rows of weight zero are read: padding repeats one row, which is in the cache, and to
find the zeros costs as much (1024 x 50 ids, half of them padding: D 16 takes 20% longer, 64 as long, 128 28% less).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.patterns.embedding_columns.index_value import IndexValue
from fxopt.patterns.embedding_columns.lookups import Lookup
from fxopt.patterns.embedding_columns.masked_rows import Describe, Masking, counted_by, masked_rows, masking_of
from fxopt.patterns.embedding_columns.masks import mask_of
from fxopt.shape.sizes import is_tensor, same, same_sizes, shape_of, static, tensor_of
from fxopt.shape.view_operators import REPEATS

aten = torch.ops.aten


@dataclass(frozen=True)
class Pooled:
    """anchor = the lookup's rows pooled over its last id axis.

    weights: a tensor [..., L] (or [..., L, 1], [..., 1, L]), one factor per id; divisor: one value per row.
    counted: the divisor is a program on the number of lanes that count.
    shared_grad: equal maxima share the gradient.
    inner: the values between the lookup and the anchor, which no edit may have changed.
    """

    anchor: Node
    lookup: Lookup
    mode: str
    weights: Node | None = None
    masking: Masking | None = None
    divisor: IndexValue | None = None
    divided_by: Node | None = None
    counted: bool = False
    shared_grad: bool = False
    inner: tuple[Node, ...] = ()


_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "max"}


def find_pooled(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """The pooling whose result `node` is, over one of the graph's `lookups`."""
    if node.op != "call_function":
        return None
    if node.target in _REDUCTIONS:
        return _reduced(node, node, _REDUCTIONS[node.target], lookups, describe)
    if node.target is operator.getitem and node.args[1] == 0:
        call = node.args[0]
        if isinstance(call, Node) and call.target is aten.max.dim and len(call.users) == 1:
            return _reduced(node, call, "max", lookups, describe)
    if node.target in (aten.bmm.default, aten.matmul.default):
        return _weighted_product(node, lookups, describe)
    if node.target in (aten.div.Tensor, aten.true_divide.Tensor):
        return _divided(node, lookups, describe)
    return None


def _reduced(anchor: Node, call: Node, mode: str, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    rows, dims = call.args[0], call.args[1] if len(call.args) > 1 else None
    if not is_tensor(rows) or call.kwargs.get("dtype") is not None:
        return None
    rank = len(shape_of(rows))
    dim = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    if not isinstance(dim, int) or rank < 3 or dim % rank != rank - 2:
        return None
    shared = call.target is aten.amax.default
    if rows in lookups:
        return None if lookups[rows].bag else Pooled(anchor, lookups[rows], mode, shared_grad=shared)
    masked = masked_rows(rows, mode, lookups, describe)
    if masked is not None:
        return Pooled(anchor, masked.lookup, mode, masking=masked.masking, shared_grad=shared, inner=masked.inner)
    if mode != "max" and rows.target is aten.mul.Tensor:
        return _weighted(anchor, rows, mode, lookups)
    return None


def _weighted(anchor: Node, product: Node, mode: str, lookups: dict[Node, Lookup]) -> Pooled | None:
    """rows * weights, in either order."""
    for rows, weights in (product.args[:2], product.args[1::-1]):
        if isinstance(rows, Node) and rows in lookups and isinstance(weights, Node):
            factor = _one_per_id(weights, rows)
            if factor is None or lookups[rows].bag is not None:
                return None
            return Pooled(anchor, lookups[rows], mode, factor, inner=(product,))
    return None


def _one_per_id(mask: Node, rows: Node) -> Node | None:
    """`mask` without its repetition over D: a tensor [..., L, 1] that `rows` [..., L, D] is multiplied by."""
    while _repeats_last_axis(mask):
        mask = mask.args[0]  # type: ignore[assignment]
    if tensor_of(mask) is None or not _converts_exactly(mask, rows):
        return None
    shape, full = shape_of(mask), shape_of(rows)
    return mask if same_sizes(shape, (*full[:-1], 1)) else None


def _converts_exactly(mask: Node, rows: Node) -> bool:
    """Whether the product has the rows' dtype, and the kernel converts the mask to it as torch does."""
    dtype, by = rows.meta["val"].dtype, mask.meta["val"].dtype
    return by == dtype or (dtype in (torch.float32, torch.float64) and not (by.is_floating_point or by.is_complex))


def _repeats_last_axis(mask: Node) -> bool:
    source = mask.args[0] if mask.args else None
    if not is_tensor(source) or tensor_of(mask) is None:
        return False
    casts = (aten.to.dtype, aten._to_copy.default)
    if mask.target in casts and source.meta["val"].dtype == mask.meta["val"].dtype:
        return True
    return mask.target in REPEATS and same_sizes(shape_of(source), (*shape_of(mask)[:-1], 1))


def _weighted_product(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """bmm(weights [B, 1, L], rows [B, L, D])."""
    weights, rows = node.args[:2]
    if not isinstance(rows, Node) or not isinstance(weights, Node) or rows not in lookups:
        return None
    shape, full = shape_of(weights), shape_of(rows)
    if len(shape) != 3 or len(full) != 3 or static(shape[1]) != 1 or not same(shape[0], full[0]):
        return None
    if weights.meta["val"].dtype != rows.meta["val"].dtype or lookups[rows].bag is not None:
        return None
    mask = mask_of(weights)
    masking = masking_of(lookups[rows].ids, mask, (0, None, 1), "scaled", 0.0, describe) if mask else None
    if mask is not None and masking is not None:
        return Pooled(node, lookups[rows], "sum", masking=masking, inner=tuple(mask.nodes))
    return Pooled(node, lookups[rows], "sum", weights)


def _divided(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """pooled / divisor, the divisor being one value per row."""
    pooled, divisor = node.args[:2]
    if not isinstance(pooled, Node) or not is_tensor(divisor):
        return None
    found = find_pooled(pooled, lookups, describe)
    if found is None or found.divisor is not None or len(pooled.users) > 1:
        return None
    shape, full = shape_of(divisor), shape_of(pooled)
    if len(shape) != len(full) or not same_sizes(shape[:-1], full[:-1]):
        return None
    if node.meta["val"].dtype != pooled.meta["val"].dtype or not _divides_exactly(divisor, pooled):
        return None
    value = describe(divisor)
    found = replace(found, anchor=node, divisor=value, divided_by=divisor, inner=(*found.inner, pooled))
    count = counted_by(value, found.masking, found.lookup.ids) if found.masking else None
    if count is not None and (static(shape[-1]) == 1 or same(shape[-1], full[-1])):
        return replace(found, counted=True, inner=(*found.inner, *count))
    return found if static(shape[-1]) == 1 else None


def _divides_exactly(divisor: Node, pooled: Node) -> bool:
    """Whether torch converts the divisor as the kernel does: a half would round an integer first."""
    dtype, by = pooled.meta["val"].dtype, divisor.meta["val"].dtype
    return by == dtype or dtype in (torch.float32, torch.float64)
