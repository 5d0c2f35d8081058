"""Tables in 8 bits: a row is D codes, then its scale and its offset, so that reading a row is one stream.

FBGEMM's fused 8-bit rowwise format, with two changes. The scale keeps 16 significant bits, so `scale * code` is exact
and code * scale + offset has the same bits with and without FMA, on every device. Rows that CUDA reads in chunks
begin at multiples of 16 bytes. In a plan's tables such a table is the uint8 tensor [R, D + 8]; the plan is as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXTRA = 8  # bytes: scale and offset, float32 each
_ROWS_AT_ONCE = 1 << 16


class NotFinite(Exception):
    """A row with NaN, an infinity, or a range beyond float32, which no scale describes."""


def quantized(table: Tensor) -> Tensor:
    """uint8 [R, D + 8] of float32 [R, D], D at least 1: each value within half a scale, a 255th of its row's range.

    Raises:
        NotFinite: see there.
    """
    rows = empty_rows(table)
    for begin in range(0, len(table), _ROWS_AT_ONCE):
        _quantize(table.detach()[begin : begin + _ROWS_AT_ONCE], rows[begin : begin + _ROWS_AT_ONCE])
    return rows


def empty_rows(table: Tensor) -> Tensor:
    R, D = table.shape
    step = 16 if D % 16 == 0 else 4
    stride = -(-(D + EXTRA) // step) * step
    return torch.empty(R, stride, dtype=torch.uint8, device=table.device)[:, : D + EXTRA]


def _quantize(table: Tensor, rows: Tensor) -> None:
    D = table.shape[1]
    low, high = table.aminmax(dim=1, keepdim=True)
    bits = ((high - low) / 255).view(torch.int32)
    scale = ((bits + 0xFF) & ~0xFF).view(torch.float32)  # rounded up, so that 255 codes reach the largest value
    if not bool(torch.isfinite(low + scale * 255).all()):
        raise NotFinite
    codes = (table - low).div_(scale.where(scale > 0, 1)).round_().clamp_(0, 255)
    rows[:, :D].copy_(codes)
    rows[:, D:].copy_(torch.cat([scale, low], 1).view(torch.uint8))


def dequantized(table: Tensor) -> Tensor:
    """float32 [R, D] of what :func:`quantized` made; any other table as it is."""
    if table.dtype != torch.uint8:
        return table
    D = dim_of(table)
    scale, low = table[:, D:].clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, 1)
    return table[:, :D].float().mul_(scale).add_(low)


def dim_of(table: Tensor) -> int:
    """D of a table in any format."""
    return table.shape[1] - EXTRA if table.dtype == torch.uint8 else table.shape[1]
