"""Gradients above 32 MB come from calloc, as zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt

R, D = 150_001, 64  # 38 MB in float32


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large, self.small = nn.Embedding(R, D, dtype=dtype), nn.EmbeddingBag(50, 3, mode="sum", dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.large(ids[:, 0]), self.small(ids % 50)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_large_gradient_is_eagers_and_is_edited_like_any_other(dtype: torch.dtype) -> None:
    model = Net(dtype)
    optimized = fxopt.optimize(model)
    for rows in (7, 0):
        ids, found = torch.randint(0, R, (rows, 2)), []
        weights = torch.randint(-8, 8, (rows, D + 3)).to(dtype)  # sums of them are exact
        for each in (model, optimized):
            model.zero_grad()
            (each(ids) * weights).sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert torch.equal(mine, theirs) and mine.is_contiguous()
    (optimized(ids) * weights).sum().backward()  # adds to it
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.large.weight.grad is not None and not model.large.weight.grad.any()
