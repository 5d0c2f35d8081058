"""Chains of view operators: fewer of them, the same tensor to the bit, the stride and the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rewrites.chains import random_chain
from tests.rewrites.shapes import Spelled, assert_alike, operators, optimized

X = torch.randn(6, 12)
BATCHES = (0, 1, 2, 7)


def test_results_are_tensor_objects_of_their_own() -> None:
    def forward(m: Any, x: Tensor) -> list[Tensor]:
        y, z = x * 2, x.sum()
        return [y, y.view(-1, 6).view(-1, 12), z.unsqueeze(0).squeeze(0), z.view(1).view(()), y.unsqueeze(0).squeeze(0)]

    fast, _ = optimized(Spelled(forward), X)
    results = fast(X)
    assert len(set(map(id, results))) == 5
    assert_alike(results, forward(None, X))


def run(chain: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for step in chain:
        x = step(x)
    return x


def ends(rng: random.Random) -> Callable[[Tensor], Tensor]:
    """What becomes of a chain's result."""
    return rng.choice(
        [
            lambda x: x,
            lambda x: x,
            lambda x: x.sin(),
            lambda x: torch.cat([x, x], 0),
            lambda x: x.clone().add_(1),
            lambda x: x.contiguous(),
            lambda x: torch.stack([x.sin(), x.sin()]).flatten(),
        ]
    )


def starts(rng: random.Random) -> Callable[[Tensor], Tensor]:
    return rng.choice([lambda x: x[:, :], lambda x: x.sin(), lambda x: torch.cat([x[:, :5], x[:, 5:]], 1)])


def chains_model(seed: int, count: int = 25) -> Spelled:
    rng = random.Random(seed)
    samples = [start for batch in (6, 0, 1) for start in laid_out(torch.randn(batch, 12))]
    parts = [(starts(rng), random_chain(rng, rng.randint(2, 8), samples), ends(rng)) for _ in range(count)]

    def forward(self: Spelled, x: Tensor) -> list[Tensor]:
        return [end(run(chain, start(x))) for start, chain, end in parts]

    return Spelled(forward)


def laid_out(x: Tensor) -> list[Tensor]:
    """The same values contiguous, transposed and with gaps."""
    gaps = torch.zeros(len(x), 24)
    gaps[:, ::2] = x
    return [x, x.t().contiguous().t(), gaps[:, ::2]]


@pytest.mark.parametrize("seed", range(4))
def test_random_chains(seed: int) -> None:
    model = chains_model(seed)
    fast, changes = optimized(model, X)
    assert len(changes) > 5
    for batch in BATCHES:
        for x in laid_out(torch.randn(batch, 12)):
            assert_alike(fast(x), model(x), [x], [x])


def linear(x: Tensor) -> Tensor:
    """Fresh and contiguous whatever the input's strides are, and blind to its argument's."""
    return F.linear(x, torch.eye(x.shape[-1], dtype=x.dtype))


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda m, x: x.unsqueeze(1).squeeze(1) + 1, ["add"]),
        (lambda m, x: x[:, 3:9][:, 1:3].unsqueeze(1)[:, 0], ["slice"]),
        (lambda m, x: x[:, 3:4].squeeze(1).sin(), ["select", "sin"]),
        (lambda m, x: x[:, 3].unsqueeze(1).sin(), ["slice", "sin"]),
        (lambda m, x: x.unsqueeze(1).expand(-1, 5, -1).permute(1, 0, 2).sin(), ["expand", "sin"]),
        (lambda m, x: x.unsqueeze(1).expand(-1, 4, -1).expand(3, -1, -1, -1).sin(), ["reshape", "expand", "sin"]),
        (lambda m, x: x.t().unsqueeze(0).transpose(1, 2).squeeze(0).sin(), ["sin"]),
        (lambda m, x: x.movedim(0, 1).movedim(0, 1).sin(), ["sin"]),
        (lambda m, x: x.split([5, 7], 1)[1].unsqueeze(2).select(1, 3).sin(), ["slice", "sin"]),
        (lambda m, x: m.dense(x).view(-1, 3, 4).flatten(1).view(-1, 2, 6).sin(), ["linear", "reshape", "sin"]),
        (lambda m, x: m.dense(m.dense(x).clone().unsqueeze(1).contiguous().view(-1, 12)), ["linear", "linear"]),
    ],
)
def test_shorter(forward: Callable[..., Any], left: list[str]) -> None:
    model = Spelled(forward, dense=torch.nn.Linear(12, 12))
    fast, changes = optimized(model, X)
    assert changes
    assert operators(fast) == left
    for batch in BATCHES:
        x = torch.randn(batch, 12)
        assert_alike(fast(x), model(x), [x], [x])


def test_a_copy_before_a_view_becomes_a_reshape() -> None:
    """The view would fail on what is not contiguous."""
    model = Spelled(lambda m, x: linear(x.view(-1, 3, 4).transpose(1, 2).contiguous().view(-1, 12)))
    fast, _ = optimized(model, X)
    assert "contiguous" not in operators(fast) and "reshape" in operators(fast)
    for batch in BATCHES:
        x = torch.randn(batch, 12)
        assert_alike(fast(x), model(x))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x.clone(),  # fresh memory leaves as fresh memory
        lambda m, x: x.contiguous(),
        lambda m, x: x.unsqueeze(1).clone().squeeze(1),
        lambda m, x: x.clone().mul_(2) + x,  # edited
        lambda m, x: (x.unsqueeze(1).squeeze(1).mul_(2), x)[1],
        lambda m, x: (x.clone(), x.add_(1))[0] + 1,  # the original is edited after the copy
        lambda m, x: x.t().contiguous().sin(),  # strides reach the caller
        lambda m, x: x.t().contiguous().view(-1),
        lambda m, x: x.t().reshape(-1).view(-1, 12).clone(),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_memory_and_strides_stay(forward: Callable[..., Any], strided: bool) -> None:
    model = Spelled(forward)
    fast, _ = optimized(model, X)
    for batch in BATCHES[1:]:
        for layout in laid_out(torch.randn(batch, 12)) if strided else [torch.randn(batch, 12)]:
            x, own = layout.clone(), layout.clone()
            assert_alike(fast(own), model(x), [x], [own])
            assert_alike(own, x)


def test_a_view_that_others_read_costs_nothing_more() -> None:
    """Bypassing a shared view would add an operator and remove none."""
    model = Spelled(lambda m, x: ((y := x.sin().unsqueeze(1)).transpose(1, 2).cos(), y.exp()))
    fast, changes = optimized(model, X)
    assert not changes and sorted(operators(fast)) == sorted(["sin", "unsqueeze", "transpose", "cos", "exp"])


class SpreadOperands(TorchDispatchMode):
    """How many operands of products have an element that stands for several."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            spread = (
                any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) for x in args
            )
            self.count += sum(spread)
        return func(*args, **(kwargs or {}))


def spread(x: Tensor) -> Tensor:
    """[B, 12] -> [B, 3, 4, 4], which repeats rows of 4."""
    return x.view(-1, 3, 4).unsqueeze(2).expand(-1, -1, 4, -1)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: spread(x).reshape(-1, 12, 4).view(-1, 4, 4) @ torch.ones(len(x) * 3, 4, 2),
        lambda m, x: (
            spread(x)
            .reshape(-1, 12, 4)
            .reshape(-1, 3, 1, 4, 4)
            .permute(0, 1, 3, 4, 2)
            .squeeze(4)
            .flatten(0, 1)
            .bmm(torch.ones(len(x) * 3, 4, 2))
        ),
        lambda m, x: spread(x).contiguous().flatten(0, 1) @ torch.ones(4, 2),
        lambda m, x: (
            spread(x).clone(memory_format=torch.contiguous_format).flatten(0, 1).bmm(torch.ones(len(x) * 3, 4, 2))
        ),
        lambda m, x: x.view(-1, 3, 1, 4).repeat(1, 1, 4, 1).flatten(0, 1).bmm(torch.ones(len(x) * 3, 4, 2)),
        lambda m, x: x.view(-1, 3, 4).repeat_interleave(4, 1).view(-1, 4, 4).bmm(torch.ones(len(x) * 3, 4, 2)),
        lambda m, x: spread(x).reshape(-1, 48).view(-1, 12, 4).view(-1, 4, 4).mT.bmm(torch.ones(len(x) * 3, 4, 2)),
    ],
)
def test_products_read_no_repeated_rows_where_eager_reads_none(forward: Callable[..., Any]) -> None:
    """torch computes the product of a matrix whose rows are one row item by item, ten times as long."""
    model = Spelled(forward)
    fast, _ = optimized(model, X)
    graph = torch.fx.Interpreter(fast._fxopt.entries[0].executable.graph)  # type: ignore[union-attr]
    for run_once in (model, graph.run):
        with SpreadOperands() as seen:
            run_once(X)
        assert seen.count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Spelled(lambda m, x: x.unsqueeze(1).transpose(1, 2).squeeze(2)[:, 2:].unsqueeze(0).flatten(0, 1))
    x = (torch.randn(6, 12) * 3).to(dtype)
    fast, changes = optimized(model, x)
    assert changes
    assert_alike(fast(x), model(x), [x], [x])


def test_gradients() -> None:
    """With gradients on, detach is no view."""
    model = Spelled(
        lambda m, x: (
            linear(x.unsqueeze(1).expand(-1, 3, -1).expand(-1, 3, 12).transpose(1, 2).unsqueeze(1).flatten(1))
            + linear(x.detach().unsqueeze(1).squeeze(1)).sum(1, keepdim=True)
        )
    )
    x = X.clone().requires_grad_()
    fast, changes = optimized(model, x)
    assert changes
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(fast(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        fast, _ = optimized(model, X)
        assert_alike(fast(X), model(X))


def test_no_grad_regions_are_left_alone() -> None:
    def forward(m: Spelled, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.unsqueeze(1)
        return y.squeeze(1) * x

    model = Spelled(forward)
    x = X.clone().requires_grad_()
    fast, changes = optimized(model, x)
    assert not changes
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_second_run_finds_nothing() -> None:
    from fxopt.capture import capture
    from fxopt.normalize import normalize
    from fxopt.rewrites import cats, identities, views
    from fxopt.rewrites.framework.core import Fuel, apply

    module = capture(chains_model(3, 8), (X,)).graph
    normalize(module)
    passes = (views.REWRITE, cats.REWRITE, identities.REWRITE)
    first, second = ([apply(each, module, Fuel(), True).changes for each in passes] for _ in range(2))
    assert any(first) and not any(second)


@pytest.mark.parametrize("spread", [lambda t, x: t, lambda t, x: t.expand(len(x), 2), lambda t, x: t.view(2, 1)])
def test_a_literal_that_leaves_is_a_copy_in_every_call(spread: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Spelled(lambda m, x: (x.sin(), spread(torch.tensor([1.0, 2.0]), x)))
    with torch.no_grad():
        fast, _ = optimized(model, X)
        fast(X[:1])[1].fill_(7)
        assert_alike(fast(X[:1])[1], model(X[:1])[1])
