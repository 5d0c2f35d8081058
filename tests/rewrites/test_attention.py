"""Attention in many spellings becomes one operator, with eager's numbers and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxopt import Config, optimize
from fxopt.shape.placements import Rows
from fxopt.shape.rows import batch_symbol, rows_of
from tests.rewrites import attention


def changes(model: nn.Module, name: str) -> list[str]:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason
    (ran,) = [ran for ran in findings.passes if ran.name == name]
    assert not ran.rolled_back
    return [change.what for change in ran.changes]


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = model(x)
    return list(result) if isinstance(result, tuple) else [result]


SPELLINGS = [("target_attention", model) for model in attention.TARGET] + [("attention", m) for m in attention.SELF]
OTHERS = [("target_attention", model) for model in attention.NOT_TARGET] + [
    ("attention", m) for m in attention.NOT_SELF
]


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_spellings(name: str, spelling: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = spelling()
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    assert len(changes(fast, name)) == 1
    for batch in getattr(model, "batches", attention.BATCHES):
        x = torch.randn(batch, 3)
        for expected, found in zip(outputs(model, x), outputs(fast, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        params = list(model.parameters())
        expected, found = (
            torch.autograd.grad(sum(y.square().sum() for y in outputs(net, x)), params) for net in (model, fast)
        )
        for one, other in zip(found, expected, strict=True):
            if other is None:
                assert one is None or not one.any()
            else:  # sums that cancel are as exact as their terms
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_near_misses(name: str, other: type[nn.Module]) -> None:
    model = other()
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    assert not changes(fast, name)
    x = torch.randn(5, 3)
    torch.testing.assert_close(fast(x), model(x))


def test_bfloat16_rounds_once() -> None:
    model = attention.Pooled(torch.bfloat16)
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    assert changes(fast, "target_attention")
    x = torch.randn(5, 3)
    exact = copy.deepcopy(model).double()(x.bfloat16().double())
    errors = [(net(x).double() - exact).abs().max() for net in (fast, model)]
    assert errors[0] <= 2 * errors[1] + 1e-3


def test_float64_stays() -> None:
    model = attention.Pooled(torch.float64)
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    assert not changes(fast, "target_attention")
    x = torch.randn(5, 3)
    torch.testing.assert_close(fast(x), model(x))


def test_rows_without_any_valid_position_are_averages() -> None:
    model = attention.Pooled()
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    x = torch.tensor([[0.0, 1.0, -1.0], [1.0, 0.5, 0.2]])
    torch.testing.assert_close(fast(x), model(x))
    _, k, mask = model.sides(x)
    assert not mask[0].any()
    torch.testing.assert_close(fast(x)[0], k[0].mean(0))


def test_weights_may_change_between_calls() -> None:
    model = attention.Pooled()
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    x = torch.randn(4, 3)
    fast(x)
    for parameter in model.parameters():
        parameter.data.mul_(-1.5)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)


class Stacked(nn.Module):
    """The second layer reads nothing but the result of the first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layers):
            x = (x @ x.mT).softmax(-1) @ x
        return x


def test_layers_behind_each_other() -> None:
    model, x = Stacked(3), torch.randn(6, 4, 3, requires_grad=True)
    fast = optimize(model, (x,), Config(tune="off"))
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(changes(fast, "attention")) == 3
    targets = [node.target for node in fast._fxopt.entries[0].executable.graph.graph.nodes]
    assert torch.ops.aten.softmax.int not in targets, "a layer was left beside its replacement"


class Unscaled(nn.Module):
    """Attention among the four positions of each row, or, turned, among the rows of the batch."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fields = x.unsqueeze(1) * torch.arange(1.0, 5.0).view(4, 1)
        if self.turned:
            fields = fields.transpose(0, 1)
        return (fields @ fields.mT).softmax(-1) @ fields


@pytest.mark.parametrize("turned", [False, True])
def test_where_its_rows_are(turned: bool) -> None:
    with torch.no_grad():
        fast = optimize(Unscaled(turned), (torch.randn(6, 3),), Config(tune="off"))
    assert len(changes(fast, "attention")) == 1
    graph = fast._fxopt.entries[0].executable.graph.graph
    batch = batch_symbol([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.fxopt.attention.default)
    assert rows_of(graph, batch)[call] == (None if turned else Rows(0))
