"""Cats and stacks: fewer of them, the same tensors to the bit, the stride and the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rewrites.shapes import Spelled, assert_alike, operators, optimized

X = torch.randn(6, 12)
BATCHES = (0, 1, 2, 7)
cat, stack = torch.cat, torch.stack


def dense(m: Any, x: Tensor) -> Tensor:
    """Reads 12 columns of any strides."""
    return m.dense(x)


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda m, x: dense(m, cat([x.sin()], 1)), ["sin", "linear"]),
        (lambda m, x: dense(m, cat([x[:, i : i + 1] for i in range(12)], -1)), ["linear"]),
        (lambda m, x: F.linear(cat([x[:, i : i + 1] for i in range(2, 9)], 1), m.narrow), ["slice", "linear"]),
        (lambda m, x: dense(m, cat(x.split([3, 4, 5], 1), 1)), ["linear"]),
        (lambda m, x: dense(m, stack(x.unbind(1), 1)), ["linear"]),
        (lambda m, x: dense(m, stack([x[:, i] for i in range(12)], 1)), ["linear"]),
        (lambda m, x: dense(m, cat([x[:, i].unsqueeze(1) for i in range(12)], 1)), ["linear"]),
        (lambda m, x: cat([cat([x, x.sin()], 1), x.cos()], 1), ["sin", "cos", "cat"]),
        (lambda m, x: cat([t.unsqueeze(1) for t in (x.sin(), x.cos())], 1), ["sin", "cos", "stack"]),
        (lambda m, x: stack([x.sin(), x.cos()], 1).flatten(1), ["sin", "cos", "cat"]),
        (lambda m, x: cat([torch.empty(0), x.sin(), x[:0], x], 0), ["sin", "cat"]),
        (
            lambda m, x: [dense(m, t) for t in cat([x.sin(), x.cos()], 1).split(12, 1)],
            ["sin", "cos", "linear", "linear"],
        ),
        (lambda m, x: [dense(m, t) for t in stack([x.sin(), x.cos()]).unbind(0)], ["sin", "cos", "linear", "linear"]),
        (lambda m, x: dense(m, stack([x.sin(), x.cos()], 1)[:, 1]), ["cos", "linear"]),
    ],
)
def test_less(forward: Callable[..., Any], left: list[str]) -> None:
    model = Spelled(forward, dense=nn.Linear(12, 12), narrow=torch.randn(3, 7))
    fast, _ = optimized(model, X)
    assert sorted(operators(fast)) == sorted(left)
    for batch in BATCHES:
        x = torch.randn(batch, 12)
        assert_alike(fast(x), model(x), [x], [x])
        wide = torch.randn(batch, 24)[:, ::2]
        torch.testing.assert_close(fast(wide), model(wide))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: cat([x], 1),  # fresh memory leaves as fresh memory
        lambda m, x: cat([x], 1).view(-1, 3, 4),
        lambda m, x: cat([x], 1).mul_(2) + x,  # edited
        lambda m, x: cat([x.sin()], 1).unsqueeze(1).add_(1),
        lambda m, x: (cat([x[:, :6], x[:, 6:]], 1), x.add_(1))[0] + 0.5,  # the original is edited after the copy
        lambda m, x: stack([x[:, i] for i in range(12)], 0).sin(),  # strides reach the caller
        lambda m, x: stack([x[:, i] for i in range(12)], 0).view(-1) * 2,
        lambda m, x: m.dense(cat([x[:, 6:], x[:, :6]], 1)),  # out of order
        lambda m, x: m.dense(cat([x[:, :6], x[:, 5:11]], 1)),  # overlapping
        lambda m, x: m.dense(cat([x[:, :6], x.sin()[:, 6:]], 1)),  # not of one tensor
        lambda m, x: m.dense(cat([x[:, :5], x[:, 6:]], 1).repeat(1, 2)[:, :12]),  # with a gap
        lambda m, x: [t.sin() for t in cat([x, x.cos()], 1).split([6, 18], 1)],  # cut elsewhere
        lambda m, x: cat([x, cat([x.sin(), x.cos()], 0)[: x.size(0)]], 1),  # other dim
        lambda m, x: (y := cat([x, x.sin()], 1), cat([y, x], 1)),  # the inner cat has another user
        lambda m, x: cat([x.long(), x], 1),  # torch promotes
        lambda m, x: cat([cat([x.long(), x.int()], 1), x.double()], 1),
    ],
)
def test_stays_what_it_was(forward: Callable[..., Any]) -> None:
    model = Spelled(forward, dense=nn.Linear(12, 12))
    fast, _ = optimized(model, X)
    for batch in BATCHES:
        x = torch.randn(batch, 12)
        eager, own = x.clone(), x.clone()
        assert_alike(fast(own), model(eager), [eager], [own])
        assert_alike(own, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Spelled(lambda m, x: cat([*(x[:, i : i + 1] for i in range(5)), cat([x.clone(), ~x.bool()], 1)], 1))
    if dtype != torch.bool:
        model = Spelled(lambda m, x: cat([*(x[:, i : i + 1] for i in range(5)), cat([x.clone(), x + 1], 1)], 1))
    x = (torch.randn(6, 12) * 3).to(dtype)
    fast, changes = optimized(model, x)
    assert changes
    assert_alike(fast(x), model(x), [x], [x])


def test_gradients() -> None:
    model = Spelled(lambda m, x: m.dense(cat([x[:, i : i + 1] for i in range(12)], 1)), dense=nn.Linear(12, 3))
    x = X.clone().requires_grad_()
    fast, changes = optimized(model, x)
    assert changes
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(fast(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
