"""NumPy arrays as arguments: such calls run eagerly, at the price of an eager call, and others are optimized."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize
from fxopt.runtime.signature import holds_array, unsupported

ARRAY = np.zeros((3, 4), np.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, features: list[Any]) -> Tensor:
        x = torch.as_tensor(features[0], dtype=torch.float32)
        return self.layer(x + self.table(torch.as_tensor(features[1], dtype=torch.int64)))


@torch.no_grad()
def test_calls_with_arrays_are_eager_and_others_are_not() -> None:
    model = Model().eval()
    fast = optimize(model)
    for rows in (3, 1, 5, 2):
        arrays = [np.random.randn(rows, 4).astype(np.float32), np.random.randint(0, 10, rows)]
        torch.testing.assert_close(fast(arrays), model(arrays), rtol=0, atol=0)
        tensors = [torch.from_numpy(array) for array in arrays]
        torch.testing.assert_close(fast(tensors), model(tensors))
    captured, refused = fast._fxopt.findings
    assert not captured.eager_reason
    expected = "argument [0][0][0]: expected a tensor or an immutable value"
    assert refused.eager_reason == f"{expected}, found ndarray (torch.from_numpy makes it a tensor)"


@pytest.mark.parametrize("value", [ARRAY, [ARRAY], (1, {"a": [ARRAY]}), {"a": (torch.ones(2), ARRAY)}])
def test_arrays_are_found_in_containers(value: object) -> None:
    assert holds_array(((value,), {})) and unsupported((value,), {})
    assert holds_array(((), {"x": value})) and unsupported((), {"x": value})


@pytest.mark.parametrize("value", [torch.ones(2), [1, "a"], {"a": (torch.ones(2), None)}, np.float32(2)])
def test_nothing_else_is_one(value: object) -> None:
    assert not holds_array(((value,), {}))
