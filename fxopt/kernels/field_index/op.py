"""fxopt::pair_select: z[:, i, j] through one index_select, where the indices are tensors that seldom change; and
fxopt::mask_places: the indices that a mask stands for.

Advanced indexing walks B x K pairs one by one; index_select copies row by row from a flat position list: 3.3 ms against
0.40 ms for the triangle of [4096, 27, 27] on one core. The list is kept, and compared with the indices at every call,
2 us each; below 16 rows that costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable

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
load = OPERATORS.load


def call_of() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """pair_select for one place in a graph. z [B, F, G], i and j int64 [K]: [B, K], any dtype."""
    kept: tuple[Tensor, Tensor, torch.Size, Tensor] | None = None

    def pair_select(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal kept
        if not z.is_cpu or not are_many(z.shape[0], _FEW_ROWS):  # comparing on a GPU waits for it
            return z[:, i, j]
        known = kept
        if known is None or known[2] != z.shape[1:] or not (torch.equal(known[0], i) and torch.equal(known[1], j)):
            if i.shape != j.shape or not (_inside(i, z.shape[1]) and _inside(j, z.shape[2])):
                return z[:, i, j]  # broadcast, or raise, as eager does
            flat = i.remainder(z.shape[1]) * z.shape[2] + j.remainder(z.shape[2])
            kept = known = (i.clone(), j.clone(), z.shape[1:], flat)
        return z.flatten(1, 2).index_select(1, known[3])

    return pair_select


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


def _inside(index: Tensor, size: int) -> bool:
    return bool(((index >= -size) & (index < size)).all())
