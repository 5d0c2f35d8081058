"""What of the GPU benchmark needs no GPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_cases import Bags, with_fbgemm


def test_fbgemm_gets_the_same_tables_and_bags():
    pytest.importorskip("fbgemm_gpu")
    bags = Bags(3, 50, 8, torch.float32, "cpu")
    ids = [torch.randint(0, 50, (12,)) for _ in range(3)]
    offsets = [torch.tensor([0, 5, 5, 12]), torch.tensor([0, 1, 2, 12]), torch.tensor([0, 4, 8, 12])]
    with torch.no_grad():
        torch.testing.assert_close(with_fbgemm(bags, ids, offsets)(), bags(ids, offsets))
