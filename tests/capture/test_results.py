"""What a forward may return, and what is said of what it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import CaptureError, capture


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Returning(nn.Module):
    def __init__(self, more: Callable[[nn.Linear, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(4, 2), more

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), {"more": self.more(self.layer, x)}


EDGES = torch.tensor([[0, 1], [2, 0]])
REFUSED = {
    "coo": (
        lambda layer, x: torch.sparse_coo_tensor(EDGES, x[0, :2], (3, 3)),
        r"output \[1\]\['more'\]: expected a plain .* one of torch.sparse_coo",
    ),
    "csr": (lambda layer, x: layer.weight.to_sparse_csr(), "expected a plain .* one of torch.sparse_csr"),
    "object": (lambda layer, x: Cache(x), r"output \[1\]\['more'\]: expected .* found Cache \(torch.utils._pytree"),
    "jagged": (lambda layer, x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "makes a nested tensor"),
}


@pytest.mark.parametrize(("more", "reason"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_is_refused_is_named(more: Callable[[nn.Linear, Tensor], Any], reason: str) -> None:
    model, x = Returning(more), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=reason):
        capture(model, (x,))
    fast = fxopt.optimize(model)
    assert type(fast(x)[1]["more"]) is type(model(x)[1]["more"])


def test_a_refused_result_alone() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Cache:
            return Cache(x * 2)

    with pytest.raises(CaptureError, match="output: expected tensors, constants or pytrees, found Cache"):
        capture(Alone(), (torch.randn(3),))


PLAIN = (2, "text", None, torch.float32, slice(1, 2), [1.5, True])


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_values_are_returned(value: Any) -> None:
    model, x = Returning(lambda layer, x: [value, x.shape[0]]), torch.randn(3, 4)
    assert not capture(model, (x,)).leaves
    assert fxopt.optimize(model)(x)[1]["more"] == [value, 3]
