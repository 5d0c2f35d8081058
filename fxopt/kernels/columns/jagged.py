"""fxopt::jagged_offsets: where the bags of a jagged tensor begin, from their lengths, which are checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import Offsets

SCHEMA = "jagged_offsets(Tensor lengths, Tensor[] ids, bool exact) -> Tensor"


def offsets(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> Tensor:
    """int64 [S + 1], from 0 on, for `lengths` int32 or int64 [S].

    Args:
        ids: tensors with a row for each id.
        exact: whether they have as many rows as all lengths together, or may have more.

    Raises:
        RuntimeError: a negative length, or another number of rows.
    """
    result = F.pad(lengths.long().cumsum(0), (1, 0))
    if (lengths < 0).any():
        raise RuntimeError("fxopt.jagged_offsets: expected lengths of at least 0")
    total = int(result[-1])
    for tensor in ids:
        if (tensor.shape[0] != total) if exact else (tensor.shape[0] < total):
            raise RuntimeError(f"fxopt.jagged_offsets: lengths of {total} ids in all, found {tensor.shape[0]}")
    return result


def fake(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> Tensor:
    return lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)


def segment_of(tensor: Tensor, bag: Offsets, n: int) -> slice:
    """The ids of one feature, of `n`."""
    ends = tensor if bag.include_last else F.pad(tensor, (0, 1), value=n)
    rows = (ends.shape[0] - 1) // bag.segments
    begin, end = int(ends[bag.segment * rows]), int(ends[(bag.segment + 1) * rows])
    if not 0 <= begin <= end <= n:
        raise RuntimeError(f"offsets must grow and stay within {n} ids, found [{begin}, {end})")
    return slice(begin, end)
