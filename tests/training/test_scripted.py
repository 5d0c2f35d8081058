"""Functions of torch.jit.script in a forward that is trained, and others whose gradient is not what ATen says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of


@torch.jit.script
def scripted_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def biased_relu(x: Tensor, bias: Tensor, scale: float = 2.0) -> Tensor:
    return (x + bias).relu() * scale


class Scripted(nn.Module):
    """One output beside a path that needs gradients too: TorchScript runs products of [B, 1] as one kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(3))
        self.inner, self.bias = nn.Linear(24, width), nn.Parameter(torch.zeros(width))
        self.outer, self.wide = nn.Linear(width, 1), nn.Linear(24, 1)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        x = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        deep = biased_relu(scripted_gelu(self.inner(x)), self.bias, scale=3.0)
        scores = (self.outer(deep) + self.wide(x)).squeeze(1)
        return scores if target is None else (scores - target).square()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss.sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("width", [1, 16])
def test_scripted_functions_are_trained(width: int) -> None:
    model = Scripted(width)
    twin = copy.deepcopy(model)
    fast = fxopt.optimize(model)
    for batch in (16, 7, 16, 1, 5):
        for target in ((), (torch.rand(batch),)):
            ids = torch.randint(0, 50, (batch, 3))
            found, expected = gradients(model, fast(ids, *target)), gradients(twin, twin(ids, *target))
            torch.testing.assert_close(found, expected)
    assert [findings.eager_reason for findings in dispatcher_of(fast).findings] == ["", ""]


def test_traced_functions_stay_eager() -> None:
    traced = torch.jit.trace(lambda x: x.sin() * 2, torch.ones(2))

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return traced(super().forward(x))

    model, x = Model(nn.Linear(4, 4)), torch.randn(3, 4)
    fast = fxopt.optimize(model)
    torch.testing.assert_close(fast(x), model(x))
    (findings,) = dispatcher_of(fast).findings
    assert "a function of torch.jit.trace" in findings.eager_reason


@torch.jit.script
def times(x: Tensor, n: int) -> Tensor:
    return x * n


@torch.jit.script
def otherwise(x: Tensor) -> Tensor:
    return x * 2 if torch.jit.is_scripting() else x + x.detach()


@torch.jit.script
def appended(x: Tensor, rows: list[Tensor]) -> Tensor:
    rows.append(x)
    return torch.stack(rows).sum(0)


@torch.jit.script
def divided(x: Tensor, by: float) -> Tensor:
    return x / by


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        x, kept = self.linear(x), [x]
        if self.function is appended:
            return appended(x, kept) * len(kept)
        return self.function(x, *more)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (times, [(torch.tensor(2.0),), (torch.tensor(2.7),)]),
        (times, [(2,), (3,)]),
        (otherwise, [(), ()]),
        (appended, [(), ()]),
        (divided, [(2,), (0.5,)]),
        (torch.jit.CompilationUnit("def ff(x):\n    return x * 2 + 1\n").ff, [(), ()]),
    ],
    ids=["tensor for int", "int", "is_scripting", "list", "int for float", "unit"],
)
def test_what_torchscript_does_otherwise(function: Any, calls: list[tuple]) -> None:
    model = Calls(function)
    fast, x = fxopt.optimize(model, config=fxopt.Config(verify="off")), torch.randn(3, 4)
    for more in calls:
        expected, found = model(x, *more), fast(x, *more)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(model, found), gradients(model, expected))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * torch.randint_like(x, 3) + torch.randint_like(x, 1, high=5, dtype=torch.float32)


def test_random_integers_like_what_is_trained_have_no_gradient() -> None:
    model, x = Noisy(), torch.randn(3, 4)
    fast = fxopt.optimize(model)
    for _ in range(2):
        torch.manual_seed(0)
        expected = gradients(model, model(x))
        torch.manual_seed(0)
        torch.testing.assert_close(gradients(model, fast(x)), expected)


class Bags(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(2))
        self.how, self.weigh = how, nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.tables[0](ids)
        if self.how == "maxima":
            pooled = rows.amax(1)
        else:
            pooled = (self.weigh(rows).softmax(1).transpose(1, 2) @ rows).squeeze(1)
        return torch.cat([pooled, self.tables[1](ids[:, 0])], 1)


@pytest.mark.parametrize("how", ["maxima", "learned weights"])
def test_columns_whose_gradient_no_kernel_has_serve_inference(how: str) -> None:
    model, ids = Bags(how), torch.randint(0, 50, (6, 5))
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    torch.testing.assert_close(gradients(model, fast(ids)), gradients(model, model(ids)))
    (findings,) = dispatcher_of(fast).findings
    misses = [miss.reason for ran in findings.passes if ran.name == "embedding_columns" for miss in ran.misses]
    assert any(f"no kernel has the gradient of {how}" in reason for reason in misses)
    assert not any(ran.changes for ran in findings.passes if ran.name == "embedding_columns"), "a lookup beside a copy"
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), model(ids))
    assert any(ran.changes for ran in dispatcher_of(fast).findings[0].passes if ran.name == "embedding_columns")
