"""fxopt::compressed_linear and fxopt::compressed_table: bfloat16, int8 and low-rank stand-ins for fp32 weights.

On an AMD with AVX-512 BF16 and VNNI, one thread, 1024 x 1024: fp32 through oneDNN 246 / 2567 us at 16 / 256 rows,
bf16 138 / 1244, int8 91 / 784.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.facts import Facts

from ..columns.quantized import NotFinite, empty_rows, quantized
from ..operators import BY_ROWS, Operator, Operators
from .kept import Kept


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, rank: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_table(table: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_rows(table) if dtype == torch.uint8 else torch.empty_like(table, dtype=dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, rank: int) -> Tensor:
    """x W^T + b with W [N, K] in `format`, of the given rank (0: as it is): float32 [.., N] from float32 [.., K].

    The weight itself serves where gradients are recorded, and for rows that int8 cannot hold (NaN, infinity, almost
    infinity).
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    try:
        for factor in _factors.of(weight, format, rank):
            rows = factor(rows)
    except NotFinite:
        return F.linear(x, weight, bias)
    result = rows if bias is None else rows.add_(bias)
    return result.view(*x.shape[:-1], weight.shape[0])


def table_in(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The table's rows in bfloat16, or in 8 bits for uint8 (:func:`..columns.quantized.quantized`).

    What 8 bits cannot hold comes in bfloat16, and what that would make infinite as it is: the kernel reads them all.
    """
    return _tables.of(table, dtype)


def _rows(table: Tensor, dtype: torch.dtype) -> Tensor:
    table = table.detach()
    if dtype == torch.uint8:
        with contextlib.suppress(NotFinite):
            return quantized(table)
    half = table.to(torch.bfloat16)
    return half if torch.equal(half.isinf(), table.isinf()) else table.clone()


def rank_for(weight: Tensor, error: float) -> int:
    """The least rank whose relative error (Frobenius norm) is at most `error`."""
    values = torch.linalg.svdvals(weight.detach().float()).square()
    left = values.flip(0).cumsum(0).flip(0)  # of what would be cut off from each position on
    return int((left > error**2 * left[0]).sum()) if left.numel() else 0


@dataclass(frozen=True)
class _Plain:
    weight: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight)


@dataclass(frozen=True)
class _Half:
    weight: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self.weight.dtype), self.weight).float()


_WIDEST = 1e30  # of rows in int8: beyond it a sum of codes times the scale may overflow before the weight's scale


@dataclass(frozen=True)
class _Int8:
    """Symmetric int8 weights, a scale each output; rows as uint8 or 7 bits with one scale and zero point a call."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        if not rows.shape[0]:
            return rows.new_empty(0, len(self.scales))
        low, high = (float(end) for end in torch.aminmax(rows))
        if not high - low < _WIDEST:
            raise NotFinite
        most = _most_code()
        scale = (max(high, 0.0) - min(low, 0.0)) / most or 1.0
        zero = round(-min(low, 0.0) / scale)
        return self.product((rows * (1 / scale)).round_().add_(zero).clamp_(0, most).to(torch.uint8), scale, zero)

    def product(self, codes: Tensor, scale: float, zero: int) -> Tensor:
        """float32 [M, N] of uint8 [M, K]."""
        return torch.ops.onednn.qlinear_pointwise.default(
            *(codes, scale, zero, self.packed, self.scales, self.zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )


@functools.cache
def _most_code() -> int:
    """Of rows. CPUs without VNNI add pairs of products in 16 bits, which two of 255 x 127 do not fit."""
    packed = _in_int8(torch.full((16, 64), 127.0, device="cpu"))
    found = packed.product(torch.full((16, 64), 255, dtype=torch.uint8, device="cpu"), 1.0, 0)
    return 255 if bool((found == 64 * 255 * 127).all()) else 127


def _compressed(weight: Tensor, format: str, rank: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    matrices = [weight.detach()]
    if rank:
        left, values, right = torch.linalg.svd(matrices[0], full_matrices=False)
        root = values[:rank].sqrt()
        matrices = [root[:, None] * right[:rank], left[:, :rank] * root]
    return tuple(_in_format(matrix, format) for matrix in matrices)


def _in_format(matrix: Tensor, format: str) -> Callable[[Tensor], Tensor]:
    if format == "bf16":
        return _Half(matrix.bfloat16())
    if format == "fp32":
        return _Plain(matrix.contiguous())
    return _in_int8(matrix)


def _in_int8(matrix: Tensor) -> _Int8:
    scales = matrix.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    packed = torch.ops.onednn.qlinear_prepack((matrix / scales[:, None]).round().to(torch.int8), None)
    return _Int8(packed, scales, torch.zeros(len(scales), dtype=torch.int32, device="cpu"))


_factors: Kept = Kept(_compressed)
_tables: Kept = Kept(_rows)

OPERATORS = Operators(
    (
        Operator(
            "compressed_linear(Tensor x, Tensor weight, Tensor? bias, str format, int rank) -> Tensor",
            linear,
            _fake_linear,
            facts=replace(BY_ROWS, keeps=True),
        ),
        Operator(
            "compressed_table(Tensor table, ScalarType dtype) -> Tensor",
            table_in,
            _fake_table,
            facts=Facts(keeps=True),
        ),
    )
)
