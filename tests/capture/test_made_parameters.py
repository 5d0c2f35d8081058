"""Layers that a forward makes anew at each call, `nn.LayerNorm(8)(x)`, and what keeps a model with them eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize

Forward = Callable[[nn.Module, Tensor], Tensor]


def in_enabled_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return layer(x) * nn.Parameter(torch.ones(4))


def of_the_callers(layer: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    return layer(x).exp()


CAPTURED: dict[str, Forward] = {
    "a norm": lambda layer, x: nn.LayerNorm(4, eps=1e-3)(layer(x)) * 2,
    "random weights": lambda layer, x: nn.Linear(4, 2)(layer(x)),
    "a parameter that is asked": lambda layer, x: layer(x) * (2 if nn.Parameter(torch.ones(4)).requires_grad else 3),
}
EAGER: dict[str, Forward] = {
    "a parameter that is returned": lambda layer, x: nn.Parameter(torch.ones(4) * 2),
    "a result that is made a leaf": lambda layer, x: layer(x).detach().requires_grad_(),
    "in enabled gradients": in_enabled_gradients,
    "an input": of_the_callers,
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("forward", [*CAPTURED.values(), *EAGER.values()], ids=[*CAPTURED, *EAGER])
def test_results_are_eagers(forward: Forward, gradients: bool) -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.layer, x)

    model = Making().eval()
    with torch.set_grad_enabled(gradients):
        fast = optimize(model, (torch.randn(3, 4),))
        for rows in (3, 1, 5):
            given = torch.randn(rows, 4)
            other = given.clone()
            torch.manual_seed(rows)
            expected = model(given)
            torch.manual_seed(rows)
            result = fast(other)
            torch.testing.assert_close(result, expected)
            assert (result.requires_grad, result.is_leaf) == (expected.requires_grad, expected.is_leaf)
            assert other.requires_grad == given.requires_grad
    if not gradients:
        reasons = [findings.eager_reason for findings in fast._fxopt.findings]
        assert any(reasons) == (forward in EAGER.values())
