"""requires_grad_() in a forward: what changes nothing is captured, and what a graph would lose keeps eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize
from fxopt.runtime import dispatcher_of


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "captured"),
    [
        (lambda y: y * y.detach().requires_grad_(False), True),
        (lambda y: y + y.detach().requires_grad_(requires_grad=False), True),
        (lambda y: y + y.detach().requires_grad_(), False),
        (lambda y: y + y.detach().requires_grad_(True), False),
    ],
    ids=["off", "off by name", "on", "surely on"],
)
def test_of_what_was_detached(function: Callable[[Tensor], Tensor], captured: bool) -> None:
    model, x = Model(function), torch.rand(4, 6)
    fast = optimize(copy.deepcopy(model))
    for each in (model, fast):
        each(x).square().sum().backward()
    torch.testing.assert_close(fast.linear.weight.grad, model.linear.weight.grad)  # type: ignore[union-attr]
    (entry,) = dispatcher_of(fast).entries
    assert (entry.executable is not None) == captured


def test_of_what_was_computed() -> None:
    fast = optimize(Model(lambda y: y.requires_grad_(False)))
    with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
        fast(torch.rand(4, 6))
