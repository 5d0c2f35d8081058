"""Gradients exactly at bounds and ties: whole numbers, zero rows, zero weights, minus zeros, infinities and NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.runtime import dispatcher_of

OFF = Config(verify="off", tune="off")
Function = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Function] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh of its own": lambda x: F.hardtanh(x, -2, 3),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.5),
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "nan_to_num": torch.nan_to_num,
    "threshold": lambda x: F.threshold(x, 1, 5),
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "softplus": lambda x: F.softplus(x, 1, 2),
    "clamp at 0": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp_max(1),
    "clamp to 6": lambda x: x.clamp(0, 6),
    "clamp to a point": lambda x: x.clamp(1, 1),
    "clamp the wrong way": lambda x: x.clamp(2, -2),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(2.0)),
    "clamp, then relu": lambda x: x.clamp(min=0).relu(),
    "relu, then clamp": lambda x: x.relu().clamp(max=2),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, torch.ones_like(x)),
    "abs": torch.abs,
    "sign": lambda x: torch.sign(x) * x,
    "round": lambda x: x - torch.round(x / 2),
    "remainder": lambda x: torch.remainder(x, 2),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, -7.0),
    "square": lambda x: x**2,
    "sqrt of relu": lambda x: x.relu().sqrt(),
    "amax": lambda x: x.amax(-1, keepdim=True) + x,
    "max": lambda x: x.max(-1, keepdim=True)[0] * x,
    "sort": lambda x: torch.sort(x, stable=True)[0] * x,
    "topk": lambda x: x.topk(2, -1)[0].sum(-1, keepdim=True) * x,
    "median": lambda x: x.median(-1, keepdim=True)[0] + x,
    "norm": lambda x: x.norm(dim=-1, keepdim=True) + x,
    "normalize": F.normalize,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
}


def whole(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def with_numbers(model: nn.Module, zero: bool = False) -> nn.Module:
    """Weights of whole numbers, whose sums are exact in any order."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.zeros_like(parameter) if zero else whole(*parameter.shape, seed=seed))
    return model


class Layers(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class LastLayer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


class Elementwise(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.scale, self.shift, self.function = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), function

    def forward(self, x: Tensor) -> Tensor:
        y = (self.function(x * self.scale + self.shift) * 2 + self.shift) * self.scale
        return torch.cat([y, y], -1)


class TargetAttention(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(16, 8), nn.Linear(8, 1), function

    def forward(self, x: Tensor) -> Tensor:
        query, keys = x[:, 0], x[:, 1:].reshape(len(x), -1, 4)
        wide = query.unsqueeze(1).expand_as(keys)
        hidden = self.function(self.first(torch.cat([wide, keys, wide - keys, wide * keys], -1)))
        return (self.second(hidden).transpose(1, 2) @ keys).squeeze(1)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of a loss of whole numbers."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.arange(y.numel()).view(y.shape).remainder(3).sub(1).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_eagers(model: nn.Module, *inputs: Tensor) -> nn.Module:
    fast = optimize(copy.deepcopy(model), config=OFF)
    for x in inputs:
        torch.testing.assert_close(gradients(fast, x), gradients(model, x), equal_nan=True)
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)
    return fast


@pytest.mark.parametrize("make", [Layers, LastLayer, Elementwise])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ties_and_bounds(name: str, make: Callable[[Function], nn.Module]) -> None:
    special = whole(5, 4)
    special[0, 0], special[1, 1], special[2, 2] = float("nan"), float("inf"), -0.0
    inputs = [whole(7, 4), whole(1, 4), torch.zeros(3, 4), torch.full((2, 4), -0.0)]
    if name not in (
        "huber",
        "normalize",
        "sort",
        "topk",
        "median",
    ):  # where infinities meet, the order of a sum decides
        inputs.append(special[:1])
    assert_eagers(with_numbers(make(ACTIVATIONS[name])), *inputs)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() - {"normalize", "sort", "topk", "median"}))
def test_infinities(name: str) -> None:
    x = whole(2, 4)
    x[0, 0], x[1, 3] = float("inf"), float("-inf")
    assert_eagers(Elementwise(ACTIVATIONS[name]), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_zero_weights_and_biases(name: str) -> None:
    model = Layers(ACTIVATIONS[name])
    with_numbers(model)
    with_numbers(model.first, zero=True)
    assert_eagers(model, whole(5, 4), whole(1, 4))


@pytest.mark.parametrize(
    "name", ["relu", "clamp at 0", "clamp to 6", "clamp_max", "leaky_relu", "abs", "relu6", "maximum", "where"]
)
def test_target_attention(name: str) -> None:
    model = with_numbers(TargetAttention(ACTIVATIONS[name]))
    assert_eagers(model, *(whole(5, 7, 4, seed=seed) for seed in range(4)), torch.zeros(2, 3, 4), whole(1, 2, 4))
