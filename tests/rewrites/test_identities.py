"""Arithmetic that gives back its argument goes only where no bit tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rewrites.shapes import Spelled, assert_alike, operators, optimized

BATCHES = (0, 1, 2, 7)


def inputs(batch: int) -> Tensor:
    """With zeros of both signs, infinities and NaN."""
    x = torch.randn(batch, 12)
    x[:, :6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45])
    return x


def linear(m: Any, x: Tensor) -> Tensor:
    """Fresh, contiguous, and a zero of either sign where x has one: the weight is the unit matrix."""
    return torch.nn.functional.linear(x, m.unit)


@pytest.mark.parametrize(
    ("forward", "gone"),
    [
        (lambda m, x: (linear(m, x) + 0).sigmoid(), "add"),
        (lambda m, x: (0.0 + linear(m, x)).exp() * 2, "add"),
        (lambda m, x: (linear(m, x) + torch.zeros(12)).softmax(1), "add"),
        (lambda m, x: (linear(m, x) + x.new_zeros(x.shape)) > 0.5, "add"),
        (lambda m, x: x.new_zeros(x.shape[0], 1) + linear(m, x).sum(1, keepdim=True), "add"),
        (lambda m, x: linear(m, x) - 0.0, "sub"),
        (lambda m, x: linear(m, x) + -0.0, "add"),
        (lambda m, x: linear(m, x).relu() * 1 + 2, "mul"),
        (lambda m, x: 1.0 * linear(m, x), "mul"),
        (lambda m, x: linear(m, x) / 1, "div"),
        (lambda m, x: linear(m, x) ** 1, "pow"),
        (lambda m, x: linear(m, x).neg().neg(), "neg"),
        (lambda m, x: linear(m, x).double().float(), "to"),
        (lambda m, x: linear(m, x).sum(1, keepdim=True).sum(1, keepdim=True), None),
        (lambda m, x: linear(m, x).unsqueeze(1).amax(1, keepdim=True), "amax"),
        (lambda m, x: linear(m, x).unsqueeze(1).mean(1, keepdim=True).sigmoid(), "mean"),
        (lambda m, x: linear(m, x).repeat(1, 1), "repeat"),
        (lambda m, x: (linear(m, x).long() + 0) * 3, "add"),
        (lambda m, x: (x.new_zeros(x.shape[0], 1) + linear(m, x)[:, :1]).relu() + torch.ones(1), "add_zeros"),
    ],
)
def test_gone(forward: Callable[..., Any], gone: str | None) -> None:
    model = Spelled(forward, unit=torch.eye(12))
    fast, changes = optimized(model, torch.randn(6, 12))
    assert changes
    if gone is not None:
        assert gone not in operators(fast)
    for batch in BATCHES:
        for x in (torch.randn(batch, 12) * torch.tensor([0.0, 1.0] * 6), torch.full((batch, 12), -0.0)):
            assert_alike(fast(x), model(x), [x], [x])


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x + 0.0,  # minus zero becomes zero
        lambda m, x: (x.relu() + 0.0) * -1,
        lambda m, x: 1 / (x + 0.0),
        lambda m, x: torch.atan2(x + 0, x),
        lambda m, x: sum([linear(m, x), linear(m, x).cos()]).sin() + (linear(m, x) + 0.0),
        lambda m, x: x.unsqueeze(1).sum(1, keepdim=True),
        lambda m, x: 0.0 - x,
        lambda m, x: x * 1,  # fresh memory leaves as fresh memory
        lambda m, x: x.double().float(),
        lambda m, x: (x * 1).mul_(2) + x,  # edited
        lambda m, x: ((x * 1).clone(), x.add_(1))[0],
        lambda m, x: x.long() * 1.0,  # another dtype
        lambda m, x: x.long() / 1,
        lambda m, x: (x > 0) * 1,
        lambda m, x: x.long() + 0.0,
        lambda m, x: x[:, :1] + torch.zeros(12),  # zeros that broadcast
        lambda m, x: x.new_zeros(x.shape[0], 12) + x[:, :1],
        lambda m, x: x.sum() + torch.zeros(1),
        lambda m, x: ((y := linear(m, x)) * 1, y / 1),  # two results, two memories
        lambda m, x: x.nan_to_num(0, 1, -1).to(torch.bfloat16).float(),  # casts that lose something
        lambda m, x: x.nan_to_num(0, 1, -1).long().float(),
        lambda m, x: (x > 0).long().float().long(),
        lambda m, x: (x.nan_to_num(0, 1, -1) * 2**30).long().float().long(),
        lambda m, x: x.sub(0, alpha=2) + torch.add(0, x.nan_to_num(), alpha=2),
        lambda m, x: (x.long() - 2**63).neg().neg(),
    ],
)
def test_stays_what_it_was(forward: Callable[..., Any]) -> None:
    model = Spelled(forward, unit=torch.eye(12))
    fast, _ = optimized(model, torch.randn(6, 12))
    for batch in BATCHES:
        x = inputs(batch)
        eager, own = x.clone(), x.clone()
        assert_alike(fast(own), model(eager), [eager], [own])
        assert_alike(own, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Spelled(lambda m, x: (((x.flatten(1).cumsum(1) * 1 + 0) ** 1) > 0, x.abs() * 1 - 0 > 2))
    x = (torch.randn(6, 12) * 3).to(dtype)
    fast, changes = optimized(model, x)
    assert changes
    assert_alike(fast(x), model(x), [x], [x])


def test_gradients() -> None:
    model = Spelled(lambda m, x: (m.dense(x) * 1 / 1 + 0).sigmoid(), dense=nn.Linear(12, 3))
    x = torch.randn(6, 12, requires_grad=True)
    fast, changes = optimized(model, x)
    assert len(changes) == 3
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(fast(x).square().sum(), x)
    assert torch.equal(found, expected)
