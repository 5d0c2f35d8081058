"""Hooks of tensors see what they see in eager: gradients, and nothing where none comes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of

R, D = 20, 3


class Apart(nn.Module):
    """Results that share calls of ours, and no way in eager's backward. ids [B, 2], x [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(R, D), nn.Embedding(R, D)
        self.linear = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        deep = self.linear(x) * self.scale
        both = torch.cat([self.first(ids[:, 0]), deep.tanh()], 1)
        return both, torch.cat([self.second(ids[:, 1]), deep.sigmoid()], 1), (x * self.scale).exp()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(0, R, (5, 2)), torch.rand(5, D).requires_grad_()


def hung(model: nn.Module, x: Tensor) -> tuple[dict[str, list[Tensor]], list]:
    """What hooks on all parameters and on x are called with, and their handles. A hook doubles what it gets."""
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[[Tensor], Tensor]:
        return lambda grad: (seen.setdefault(name, []).append(grad.clone()), grad * 2)[1]

    return seen, [tensor.register_hook(hook(name)) for name, tensor in [*model.named_parameters(), ("x", x)]]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("late", [False, True])
def test_hooks_see_what_eager_shows_them(number: int, late: bool) -> None:
    torch.manual_seed(0)
    model, (ids, x) = Apart(), inputs()
    twin, twin_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    optimized = fxopt.optimize(twin)
    if late:
        optimized(ids, twin_x)
    seen, expected = hung(twin, twin_x), hung(model, x)
    for _ in range(2):
        model(ids, x)[number].sum().backward()
        optimized(ids, twin_x)[number].sum().backward()
    assert seen[0].keys() == expected[0].keys() and len(expected[0]) < 6
    torch.testing.assert_close(seen[0], expected[0])
    for mine, theirs in zip([*twin.parameters(), twin_x], [*model.parameters(), x], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None


def test_a_handle_removes_its_hook() -> None:
    model, (ids, x) = Apart(), inputs()
    optimized = fxopt.optimize(model)
    seen, handles = hung(model, x)
    optimized(ids, x)[0].sum().backward()
    assert seen
    seen.clear()
    for handle in handles:
        handle.remove()
    optimized(ids, x)[0].sum().backward()
    assert not seen and not model.first.weight._backward_hooks
