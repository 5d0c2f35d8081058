"""Which format a table's rows take, what that does to its values, and what it gains on this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fxopt.kernels.columns import op
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source
from fxopt.kernels.columns.quantized import dequantized
from fxopt.kernels.compressed.op import table_in
from fxopt.tune.clock import fastest, on_device_of

_LEAST_DIM = 8  # below it a scale and an offset are most of a row
_SAMPLED_ROWS = 4096
_LOSS = 0.96  # as in tune: between it and 1 is noise
_PATIENCE = 0.02  # seconds a table
_BAG = 32


class Use(NamedTuple):
    """How a column reads a table."""

    pool: str
    jagged: bool
    weighted: bool

    @classmethod
    def of(cls, column: Column) -> Use:
        return cls(column.pool, column.bag is not None, column.weights is not None)


@dataclass(frozen=True)
class Rows:
    """How a table is read.

    Attributes:
        format: "int8", "bf16", or "" where it stays as it is.
        before, after: bytes.
        error: how far off a value is, in a sample of the rows.
        gain: time to read rows at random, before / after, of its slowest use; None where nobody asked.
    """

    format: str
    before: int
    after: int
    error: float
    gain: float | None

    @property
    def dtype(self) -> torch.dtype:
        """What compressed_table is asked for."""
        return torch.uint8 if self.format == "int8" else torch.bfloat16

    @property
    def pays(self) -> bool:
        return self.format != "" and (self.gain is None or self.gain >= _LOSS)


@torch.no_grad()
def rows_of(weight: Tensor, precision: str, uses: Iterable[Use], timed: bool) -> Rows:
    """The format for `weight`, float32 [R, D]: the one that was asked for, or one of more bits where D is too small
    or a row is not finite. Timed on rows at random: what a trial makes up for ids lies in the cache."""
    wide = precision == "int8" and weight.shape[1] >= _LEAST_DIM
    rows = table_in(weight, torch.uint8 if wide else torch.bfloat16)
    format = {torch.uint8: "int8", torch.bfloat16: "bf16"}.get(rows.dtype, "")
    sample = slice(None, None, max(1, len(weight) // _SAMPLED_ROWS))
    errors = (dequantized(rows[sample]).float() - weight.detach()[sample]).abs()
    error = float(errors.nan_to_num(0.0).max()) if errors.numel() else 0.0  # inf - inf: equal
    gain = min((_gain(weight, rows, use) for use in uses), default=None) if timed and format and len(weight) else None
    return Rows(format, weight.nbytes, len(rows) * rows.stride(0) * rows.element_size(), error, gain)


def _gain(weight: Tensor, rows: Tensor, use: Use) -> float:
    n = 1 << (18 if weight.is_cuda else 13)
    ids = torch.randint(0, len(weight), (n,), device=weight.device)
    factors, begins = torch.rand(n, device=weight.device), torch.arange(0, n, _BAG, device=weight.device)
    lane = 1 if use.pool != "none" and not use.jagged else None
    tensors = [values.view(-1, _BAG) if lane else values for values in (ids, factors)] + [begins]
    column = Column(
        *(Source(0, lane=lane), 0, 0, 0),
        pool=use.pool,
        bag=Offsets(2) if use.jagged else None,
        weights=Source(1, lane=lane) if use.weighted else None,
    )
    plan = encode(Plan((column,), (weight.shape[1],), ("float32",)))
    runs = [functools.partial(op.columns, tensors, [table], plan) for table in (weight.detach(), rows)]
    with on_device_of([weight]):
        before, after = fastest(runs, _PATIENCE)
    return before / after


def told(rows: Iterable[Rows]) -> str:
    """The formats as the report names them."""
    groups: dict[str, list[Rows]] = {}
    for each in rows:
        groups.setdefault(each.format if each.pays else "slower" if each.format else "stays", []).append(each)
    return "; ".join(_group(name, group) for name, group in groups.items())


def _group(name: str, rows: list[Rows]) -> str:
    tables = f"{len(rows)} {'table' if len(rows) == 1 else 'tables'}"
    if name == "stays":
        return f"{tables} with values that fit no fewer bits"
    gains = [each.gain for each in rows if each.gain is not None]
    times = f", {min(gains):.2f}x" + (f" to {max(gains):.2f}x" if len(gains) > 1 else "") if gains else ""
    if name == "slower":
        return f"{tables} read slower on this machine in fewer bits{times}"
    before, after = (sum(sizes) / 2**20 for sizes in zip(*((r.before, r.after) for r in rows), strict=True))
    error = max(each.error for each in rows)
    speed = f"{times} at rows read at random" if times else ""
    return f"{tables} in {name}: {after:,.0f} MiB for {before:,.0f}, values off by up to {error:.1e}{speed}"
