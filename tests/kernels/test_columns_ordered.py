"""Bags whose gradients add in one order: the values and gradients of torch's own bags."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxopt.kernels.columns.ordered import _first_max
from fxopt.torch_internals.seeds import seed_started


@pytest.mark.parametrize("seed", range(8))
def test_maxima_of_bags_with_nan_and_infinities(seed: int) -> None:
    seed_started(seed)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 2.0])
    table = special[torch.randint(0, 5, (6, 3))].requires_grad_()
    offsets = torch.tensor([0, 0, 4, 5, 12])  # the first bag is empty
    ids, grad = torch.randint(0, 6, (12,)), torch.randn(4, 3)

    expected = F.embedding_bag(ids, table, offsets, mode="max", include_last_offset=True)
    bags = torch.arange(4).repeat_interleave(offsets.diff())
    found = _first_max(F.embedding(ids, table), bags, 4)

    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    gradients = [torch.autograd.grad(out, table, grad)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients)
