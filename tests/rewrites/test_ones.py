"""Dims of size 1 behind linears: computed without, and with the values, shapes and gradients that they had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites import PASSES

OTHERS = tuple(ran.name for ran in PASSES if ran.name not in ("ones", "disguised_linears"))


class Model(nn.Module):
    def __init__(self, f: Callable[..., object]) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> object:
        return self.f(x, self.w, self.b)


def optimized(f: Callable[..., object]) -> tuple[Model, nn.Module, list[str]]:
    model = Model(f)
    fast = optimize(model, (torch.randn(6, 4),), Config(verify="full", tune="off", disable=OTHERS))
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason
    assert not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    graph = fast._fxopt.entries[0].executable.graph.graph  # type: ignore[union-attr, index]
    shapes = {node.target._opname: node.meta["val"].dim() for node in graph.nodes if _is_call(node)}
    return model, fast, [f"{name} {rank}" for name, rank in shapes.items()]


def _is_call(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta["val"], Tensor)


def cross(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x0 = xl = x.unsqueeze(2)
    for _ in range(3):
        xl = x0 * (torch.matmul(w, xl) + b) + xl
    return xl.squeeze(2)


def seen(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(torch.matmul(w, x.unsqueeze(2)))
    return y, (y * b).squeeze(2)


def in_front(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.matmul(w, x.unsqueeze(2)).view(-1, 1, 4)
    return (y.sigmoid() * b.t() + 1.0).squeeze(1)


def of_two_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.where(torch.matmul(w, x.unsqueeze(2)) > 0, b, 2 * x.unsqueeze(2)).clamp(max=1.5).squeeze(2)


@pytest.mark.parametrize(
    ("f", "there"),
    [(cross, ["mul 2", "add 2"]), (seen, ["tanh 2"]), (in_front, ["sigmoid 2"]), (of_two_rows, ["where 2", "gt 2"])],
)
def test_sinks(f: Callable, there: list[str]) -> None:
    model, fast, found = optimized(f)
    assert set(there) <= set(found)
    for rows in (0, 1, 2, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), model(x))
        seeded = [torch.autograd.grad(_total(net(x)), [model.w, model.b], allow_unused=True) for net in (model, fast)]
        torch.testing.assert_close(seeded[1], seeded[0])
    assert _leaves(fast(x))[0].stride() == _leaves(model(x))[0].stride()


def _total(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in _leaves(result)]).sum()


def _leaves(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def edited(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.matmul(w, x.unsqueeze(2))
    view = y[:, :2]
    z = y * 2
    view.fill_(1)
    return z.squeeze(2) + y.squeeze(2)


def test_what_is_edited_later_stays() -> None:
    model, fast, found = optimized(edited)
    assert "mul 3" in found
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), model(x))
