"""Which vectors the CUDA kernels serve."""

from __future__ import annotations

import torch

from ..columns.plan import Column, Plan

MOST_VECTORS, MOST_DIM = 32, 128
HALVES = (torch.bfloat16, torch.float16)
STEPS = {torch.float32: 4, **dict.fromkeys(HALVES, 16)}  # what D is a multiple of
# Of products by pairs: D, so that a block's threads can share a vector, floats of a sample, and pairs.
MOST_MULTIPLIED, MOST_FLOATS, MOST_PAIRS = 256, 12 * 1024, 1 << 16


def fits(dtype: torch.dtype, vectors: int, dim: int) -> bool:
    """Whether the kernels serve vectors of these sizes."""
    return dtype in STEPS and vectors <= MOST_VECTORS and 0 < dim <= MOST_DIM and dim % STEPS[dtype] == 0


def multiplies(vectors: int, dim: int) -> bool:
    """Whether the kernel for products by pairs serves vectors of these sizes: 4 more of each keep it off some banks."""
    return vectors > 0 and 0 < dim <= MOST_MULTIPLIED and vectors * (dim + 4) <= MOST_FLOATS


def vectors(plan: Plan, dim: int) -> int | None:
    """How many vectors of `dim` numbers a plan's columns are; None where one is more than a lookup or a copy."""
    n = len(plan.columns)
    if plan.widths != (n * dim,) or sorted(column.offset for column in plan.columns) != [k * dim for k in range(n)]:
        return None
    return n if all(_is_vector(column, dim) for column in plan.columns) else None


def _is_vector(column: Column, dim: int) -> bool:
    source = column.source
    if column.bag or column.add or column.divisor or column.pool != "none" or not source.rows:
        return False
    copied = source.lane is not None and source.length == dim and not column.program
    return source.lane is None if column.table is not None else copied
