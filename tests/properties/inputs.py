"""Inputs of random models: calm or extreme values, in any memory layout, at any size."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "every other", "transposed")
_EXTREME_FLOATS = (
    torch.nan,
    torch.inf,
    -torch.inf,
    -0.0,
    0.5,
    1e-40,
    3e38,
    -3e38,
    1e10,
    16777217.0,
    -1.5,
    2.5,
    9.3e18,
    -1e19,
)
_EXTREME_WEIGHTS = (torch.nan, torch.inf, -torch.inf, -0.0, 0.5, -1.5, 2.5)  # whose sums are the same in any order
_EXTREME_INTS = (
    -1,
    0,
    1,
    7,
    100,
    2**31 - 1,
    2**31,
    -(2**31),
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    -(2**63) + 1,
    -7,
    127,
    -128,
)


@dataclass(frozen=True)
class Sizes:
    """Batch size, and the base of the lengths of padded sequences."""

    batch: int
    length: int


@dataclass(frozen=True)
class Input:
    """One argument of forward.

    dims: "B" and "L" or numbers. role: part of a jagged feature ("ids", "offsets", "weights" share lengths), or "".
    limit: calm integers and floats are in [0, limit). wild: every third value is an extreme one.
    spare: a jagged feature may have ids behind its last offset, if it has bags: without, torch writes out of bounds.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype
    limit: int = 8
    wild: bool = False
    layout: str = "contiguous"
    grad: bool = False
    role: str = ""
    include_last: bool = False
    spare: bool = False

    def make(self, sizes: Sizes, seed: int) -> Tensor:
        family = self.name.split("_")[0]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {sizes} {seed}".encode()))
        if self.role:
            lengths = torch.randint(0, 4, (sizes.batch,), generator=generator)
            if self.role == "offsets":
                ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                return (ends if self.include_last else ends[:-1]).to(self.dtype)
            dims = [int(lengths.sum()) + (seed % 3 if self.spare and sizes.batch else 0)]
        else:
            own = sizes.length + zlib.crc32(self.name.encode()) % 3 if sizes.length else 0
            dims = [{"B": sizes.batch, "L": own}.get(dim, dim) for dim in self.dims]  # type: ignore[misc, call-overload]
        values = self._laid_out(self._values(dims, generator))
        return values.requires_grad_() if self.grad else values

    def _values(self, dims: list[int], generator: torch.Generator) -> Tensor:
        if self.dtype.is_floating_point:
            values = torch.randint(0, 4 * self.limit, dims, generator=generator) / 4
            values = values.to(self.dtype)
        else:
            values = torch.randint(0, self.limit, dims, generator=generator).to(self.dtype)
        if not self.wild:
            return values
        extremes = self._extremes()
        chosen = extremes[torch.randint(0, len(extremes), dims, generator=generator)]
        return torch.where(torch.randint(0, 3, dims, generator=generator) == 0, chosen, values)

    def _extremes(self) -> Tensor:
        if self.role == "weights":
            return torch.tensor(_EXTREME_WEIGHTS, dtype=self.dtype)
        if self.dtype.is_floating_point:
            return torch.tensor(_EXTREME_FLOATS, dtype=torch.float64).to(self.dtype)
        limits = torch.iinfo(self.dtype)
        fitting = [value for value in _EXTREME_INTS if limits.min <= value <= limits.max]
        return torch.tensor([*fitting, limits.min, limits.max], dtype=self.dtype)

    def _laid_out(self, values: Tensor) -> Tensor:
        if self.layout == "every other" and values.dim():
            return torch.stack([values, values], values.dim()).flatten(-2)[..., ::2]
        if self.layout == "transposed" and values.dim() > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        return values
