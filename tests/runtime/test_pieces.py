"""Opaque leaves run with those of their submodules optimized that can be, and nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.capture import LeafCall
from fxopt.runtime import OptimizedMixin

CONFIG = Config(tune="off")


class Score(nn.Module):
    """Enough operators that pack into one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Steps(nn.Module):
    """A loop whose length depends on data; what can be captured is two modules further in."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([Score(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.detach().abs().sum()) % 2 + 1):
            x = self.each[1](self.each[0](x).tanh())
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.score = Steps(), Score()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last = float(x.detach().sum())
        self.calls += 1
        if self.last > 0:
            return self.score(x)
        return self.steps(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).sigmoid() * x).sigmoid() + 1


def pieces_of(fast: nn.Module) -> object:
    (call,) = [m for m in fast._fxopt.entries[0].executable.graph.modules() if isinstance(m, LeafCall)]
    return call.pieces


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_same_answers_and_effects(sign: float) -> None:
    model = Outer()
    fast = optimize(model, (sign * torch.rand(6, 4),), CONFIG)
    assert pieces_of(fast)
    before = float(model.inner.calls)
    for batch in (1, 3, 6, 0):
        x = sign * torch.rand(batch, 4)
        expected, last, model.inner.last = model(x), model.inner.last, None
        torch.testing.assert_close(fast(x), expected)
        assert model.inner.last == pytest.approx(last)
    assert float(model.inner.calls) == before + 8
    assert not any(isinstance(module, OptimizedMixin) for module in model.modules())


def test_a_part_is_optimized_and_trains() -> None:
    model, x = Outer(), torch.rand(5, 4)
    fast = optimize(model, (x,), CONFIG)
    part = pieces_of(fast)._parts[model.inner.score].fast
    (findings,) = part._fxopt.findings
    assert findings.operators_after < findings.operators_before
    params = [model.first.weight, *model.inner.score.parameters()]
    for left, right in zip(*(torch.autograd.grad(net(x).sum(), params) for net in (fast, model)), strict=True):
        torch.testing.assert_close(left, right)
    with torch.no_grad():
        model.inner.score.layers[0].weight += 1
        torch.testing.assert_close(fast(x), model(x))


def test_parts_where_a_part_cannot_be_captured() -> None:
    model, x = Outer(), -torch.rand(5, 4)
    fast = optimize(model, (x,), CONFIG)
    steps = pieces_of(fast)._parts[model.inner.steps]
    assert steps.fast._fxopt.findings[0].eager_reason or steps.fast._fxopt.findings[0].leaves
    torch.testing.assert_close(fast(x), model(x))


def test_a_hook_gets_the_module_itself() -> None:
    model, x, seen = Outer(), torch.rand(5, 4), []
    fast = optimize(model, (x,), CONFIG)
    for module in (model.inner, model.inner.score):
        module.register_forward_hook(lambda module, *_: seen.append(module))
    fast(x)  # captured anew, on copies
    seen.clear()
    fast(x)
    assert seen == [model.inner.score, model.inner]


def test_what_the_user_names_stays_whole() -> None:
    fast = optimize(Outer(), (torch.rand(5, 4),), Config(tune="off", leaves=("inner",)))
    assert pieces_of(fast) is None


def test_an_error_inside_is_eagers() -> None:
    class Strict(Outer):
        def __init__(self) -> None:
            super().__init__()
            self.inner.score.register_forward_pre_hook(self.check)

        @staticmethod
        def check(module: nn.Module, args: tuple) -> None:
            if args[0].max() > 1e3:
                raise ValueError("too large")

    fast = optimize(Strict(), (torch.rand(5, 4),), CONFIG)
    with pytest.raises(ValueError, match="too large"):
        fast(torch.full((5, 4), 1e5))
