"""fxopt::pair_select: z[:, i, j] through one index_select, where the indices are tensors that seldom change; and
fxopt::mask_places: the indices that a mask stands for.

Advanced indexing walks B x K pairs one by one; index_select copies row by row from a flat position list: 3.3 ms against
0.40 ms for the triangle of [4096, 27, 27] on one core. The list is kept, and compared with the indices at every call,
2 us each; below 16 rows that costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..by_rows.many import are_many
from ..operators import BY_ROWS, Operator, Operators

_FEW_ROWS = 15


def _pair_select(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return z[:, i, j]


def _mask_places(mask: Tensor, count: int) -> Tensor:
    places = mask.nonzero().t()
    if places.shape[1] != count:
        raise ValueError(f"expected a mask over {count} fields, as at the capture, found one over {places.shape[1]}")
    return places.contiguous()


def _mask_places_fake(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((mask.dim(), count), dtype=torch.int64)


OPERATORS = Operators(
    (
        Operator("pair_select(Tensor z, Tensor i, Tensor j) -> Tensor", _pair_select, facts=BY_ROWS),
        Operator("mask_places(Tensor mask, int count) -> Tensor", _mask_places, _mask_places_fake),
    )
)


def call_of() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """pair_select for one place in a graph. z [B, F, G], i and j int64 [K]: [B, K], any dtype."""
    kept: _Kept | None = None

    def pair_select(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal kept
        on_cpu = z.is_cpu
        if on_cpu and not are_many(z.shape[0], _FEW_ROWS):
            return z[:, i, j]
        if not on_cpu and not (z.requires_grad and torch.is_grad_enabled()):
            return z[:, i, j]
        if kept is None or (on_cpu and not kept.holds(z, i, j)):
            if not on_cpu and _is_capturing(z):
                return z[:, i, j]
            kept = _Kept(z, i, j)
        if kept.flat is None or not (on_cpu or kept.holds(z, i, j)):
            return z[:, i, j]  # broadcasts, or raises, as eager does; or other indices on a GPU
        return z.flatten(1, 2).index_select(1, kept.flat) if on_cpu else _Selected.apply(z, kept.flat)

    return pair_select


class _Kept:
    """The flat positions of pairs, as long as the indices are the same. On a GPU only those that name no pair twice,
    and memory and versions of the indices tell whether they changed, as a comparison would wait for it.

    Attributes:
        flat: int64 [K], or None: the pairs are no such list.
    """

    def __init__(self, z: Tensor, i: Tensor, j: Tensor) -> None:
        self._sizes = z.shape[1:]
        self._i, self._j = (i.clone(), j.clone()) if z.is_cpu else (i, j)
        self._places = () if z.is_cpu else (_place(i), _place(j))
        self.flat: Tensor | None = None
        if i.shape == j.shape and i.dim() == 1 and _inside(i, z.shape[1]) and _inside(j, z.shape[2]):
            flat = i.remainder(z.shape[1]) * z.shape[2] + j.remainder(z.shape[2])
            if z.is_cpu or len(flat.unique()) == len(flat):
                self.flat = flat

    def holds(self, z: Tensor, i: Tensor, j: Tensor) -> bool:
        if z.shape[1:] != self._sizes:
            return False
        if z.is_cpu:
            return torch.equal(self._i, i) and torch.equal(self._j, j)
        return (_place(i), _place(j)) == self._places


def _place(index: Tensor) -> tuple:
    """Where an index lies, and its version; one made in inference mode has none, and is like no other."""
    version = object() if index.is_inference() else index._version
    return index.data_ptr(), index.shape, index.stride(), version


class _Selected(torch.autograd.Function):
    """z[:, pairs] of pairs that differ, with a gradient that copies: on an H100, 12 us instead of the 147 in which
    PyTorch sorts the pairs (B = 2048, 351 pairs of 27)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, flat: Tensor) -> Tensor:
        ctx.save_for_backward(flat)
        ctx.shape = z.shape
        return z.flatten(1, 2).index_select(1, flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (flat,) = ctx.saved_tensors
        batch, *sizes = ctx.shape
        return grad.new_zeros(batch, sizes[0] * sizes[1]).index_copy(1, flat, grad).view(ctx.shape), None


def places_of() -> Callable[[Tensor, int], Tensor]:
    """mask_places for one place in a graph: int64 [mask.dim(), count], the places where it is True, in order.

    Raises:
        ValueError: the mask has another number of them than the graph was made for.
    """
    kept: tuple[Tensor, Tensor] | None = None

    def mask_places(mask: Tensor, count: int) -> Tensor:
        nonlocal kept
        if not mask.is_cpu:
            return _mask_places(mask, count)
        known = kept
        if known is None or not torch.equal(known[0], mask):
            kept = known = (mask.clone(), _mask_places(mask, count))
        return known[1]

    return mask_places


def _is_capturing(z: Tensor) -> bool:
    return z.is_cuda and torch.cuda.is_current_stream_capturing()


def _inside(index: Tensor, size: int) -> bool:
    return bool(((index >= -size) & (index < size)).all())
