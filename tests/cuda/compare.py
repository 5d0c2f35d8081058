"""What the CUDA kernel must return: the reference's bits, and for reordered sums nearly the same numbers."""

from __future__ import annotations

import random

import torch
from torch import nn

from fxopt.kernels.columns import reference
from tests.kernels.conftest import RandomCall
from tests.kernels.test_columns_random import same_bits, slots


class Two(nn.Module):
    """Two columns, by [B, 2] ids, of tables of 10 and 20 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(10, 8), nn.Embedding(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x[:, 0]), self.b(x[:, 1])], 1)


KINDS = ("lookup", "lookup", "dense_pool", "bag", "copy", "more", "masked")
RELATIVE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def random_call(seed: int, rows: int, n_columns: int, kinds: tuple[str, ...] = KINDS) -> RandomCall:
    torch.manual_seed(seed)
    call = RandomCall(random.Random(seed), rows).start()
    for _ in range(n_columns):
        getattr(call, call.rng.choice(kinds))()
    return call


def assert_same(call: RandomCall, found: torch.Tensor) -> None:
    (expected,) = reference.columns(call.tensors, call.tables, call.plan)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    for (column, a), (_, b) in zip(slots(call, found), slots(call, expected), strict=True):
        if column.pool not in ("sum", "mean"):
            assert same_bits(a, b), column
            continue
        assert (a.isnan() == b.isnan()).all() and (a.isinf() == b.isinf()).all(), column
        error = (a.double() - b.double()).abs() / (b.double().abs() + 1)
        assert not (error[error.isfinite()] > RELATIVE[a.dtype]).any(), column
