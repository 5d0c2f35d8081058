"""F.embedding and F.embedding_bag whose gradients add in one order on CUDA too, so that two runs give the same bits.

torch's own add there as threads come (bags' maxima, and embeddings of many ids of few rows). Here ids are sorted,
stably, and the rows of each are summed by a segmented reduction.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import gradients


def embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """As F.embedding."""
    if not (table.is_cuda and table.requires_grad):
        return F.embedding(ids, table, padding_idx=padding_idx)
    return _Embedding.apply(ids, table, padding_idx)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = table.shape[0], padding_idx
        return F.embedding(ids, table)

    @staticmethod
    @gradients.where_they_flow
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        flat, grads = ids.flatten(), grad.reshape(ids.numel(), grad.shape[-1])
        if ctx.padding_idx is not None:
            grads = torch.where((flat == ctx.padding_idx).unsqueeze(1), 0, grads)
        return None, sum_by_id(flat, grads, ctx.rows), None


def sum_by_id(ids: Tensor, grads: Tensor, rows: int) -> Tensor:
    """[rows, D], where row r is the sum of the grads [N, D] of the ids [N] that are r, in the order they come."""
    total = grads.new_zeros(rows, grads.shape[1])
    if ids.numel() == 0 or grads.shape[1] == 0:
        return total
    in_order, order = ids.sort(stable=True)
    found, counts = in_order.unique_consecutive(return_counts=True)
    sums = torch.segment_reduce(_wide(grads[order]), "sum", lengths=counts, unsafe=True)
    total[found] = sums.to(total.dtype)
    return total


def embedding_bag(ids: Tensor, table: Tensor, offsets: Tensor, **how: Any) -> Tensor:
    """As F.embedding_bag with include_last_offset, offsets from 0, and perhaps ids past the last."""
    if not (table.is_cuda and table.requires_grad) or ids.numel() == 0:
        return F.embedding_bag(ids, table, offsets, **how)
    mode, weights, padding = how["mode"], how["per_sample_weights"], how["padding_idx"]
    n, n_bags = ids.numel(), offsets.numel() - 1
    position = torch.arange(n, device=ids.device)
    bag = torch.searchsorted(offsets.contiguous(), position, right=True) - 1
    kept = bag < n_bags
    if padding is not None:
        kept = kept & (ids != padding)
    rows = embedding(ids, table)
    if mode == "max":
        return _first_max(rows, torch.where(kept, bag, n_bags), n_bags)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    rows = _wide(rows.masked_fill(~kept.unsqueeze(1), 0))
    lengths = F.pad(offsets, (0, 1), value=n).diff()
    total = torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True, initial=0)[:n_bags]
    if mode == "mean":
        # Counted as floats are summed: exact, and in an order of its own.
        counts = torch.segment_reduce(kept.to(rows.dtype), "sum", lengths=lengths, unsafe=True, initial=0)[:n_bags]
        total = total / counts.clamp(min=1).unsqueeze(1)
    return total.to(table.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() == 2 else x


def _first_max(rows: Tensor, bag: Tensor, n_bags: int) -> Tensor:
    """The maximum of each bag, whose gradient goes to the first that reaches it. rows [N, D], bag [N] of n_bags + 1.

    As in F.embedding_bag, NaN counts only where it comes first, and nothing is larger then.
    """
    n, D = rows.shape
    position = torch.arange(n, device=rows.device)
    heads = position.new_full((n_bags + 1,), n).scatter_reduce(0, bag, position, "amin")
    unordered = torch.where(position == heads[bag], torch.inf, -torch.inf).unsqueeze(1).to(rows.dtype)
    bag, values = bag.unsqueeze(1).expand(n, D), rows.detach()
    values = torch.where(values.isnan(), unordered, values)
    best = values.new_full((n_bags + 1, D), -torch.inf).scatter_reduce(0, bag, values, "amax")
    first = torch.where(values == best.gather(0, bag), position.unsqueeze(1), n)
    first = torch.full_like(best, n, dtype=torch.int64).scatter_reduce(0, bag, first, "amin")[:n_bags]
    return torch.where(first < n, rows.gather(0, first.clamp(max=n - 1)), 0)
