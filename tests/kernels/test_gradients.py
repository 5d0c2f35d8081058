"""Derivatives of higher order, and of many outputs at once, through every operator that has gradients of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from tests.rewrites import attention, pointwise, products
from tests.rewrites.test_catalogue import AttentionOverPairs, Columns, PairSum, Tower, Triangle


def third(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a penalty on the second derivatives, which a penalty on the input's gradient gave."""
    inputs = x.clone().requires_grad_()
    wanted = [inputs, *model.parameters()]
    (first,) = torch.autograd.grad(model(inputs).pow(3).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), wanted, create_graph=True, allow_unused=True)
    norm: Tensor = sum(part.square().sum() for part in second if part is not None)  # type: ignore[assignment]
    return [part for part in torch.autograd.grad(norm, wanted, allow_unused=True) if part is not None]


def jacobians(model: nn.Module, x: Tensor) -> list[Tensor]:
    inputs = x.clone().requires_grad_()
    outputs = model(inputs).flatten()
    wanted = [inputs, *model.parameters()]
    identity = torch.eye(len(outputs))
    found = torch.autograd.grad(outputs, wanted, identity, is_grads_batched=True, allow_unused=True)
    return [part for part in found if part is not None]


@pytest.mark.parametrize("derive", [third, jacobians])
@pytest.mark.parametrize(
    "make",
    [pointwise.Gated, PairSum, Triangle, Tower, AttentionOverPairs, products.Compressed, attention.Heads],
)
def test_derivatives(make: Callable[[], nn.Module], derive: Callable[..., list[Tensor]]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(4, 3)
    fast = optimize(copy.deepcopy(model), (x,), Config(tune="off"))
    assert any(ran.changes for ran in fast._fxopt.findings[0].passes)
    torch.testing.assert_close(derive(fast, x), derive(model, x), rtol=1e-3, atol=1e-4)


def test_the_gradient_of_a_gradient_alone_knows_the_tables() -> None:
    model = Columns()
    x = torch.randn(4, 3)
    fast = optimize(copy.deepcopy(model), (x,), Config(tune="off"))

    def penalty(of: nn.Module) -> list[Tensor]:
        tables = list(of.parameters())
        first = torch.autograd.grad(of(x).pow(3).sum(), tables, create_graph=True)
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), tables))  # type: ignore[arg-type]

    torch.testing.assert_close(penalty(fast), penalty(model), rtol=1e-3, atol=1e-4)
