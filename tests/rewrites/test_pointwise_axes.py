"""Along which axes pointwise programs read what they read, and results that have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.kernels.pointwise.encode import plan_of
from tests.rewrites.test_pointwise import ONLY, B, D, N


def distances(x: Tensor) -> Tensor:
    return ((x[:, :, None] - x[:, None, :]).square().sum(-1) + 1).sqrt()


def by_its_transpose(x: Tensor) -> Tensor:
    return (torch.tanh(x * x.mT) * 2 + 1).contiguous()


def weighted(x: Tensor) -> Tensor:
    """As TabR writes retrieval: what is computed of the expanded vectors is the same for all that they are held to."""
    candidates = x.unsqueeze(1).expand(-1, N, -1, -1)
    scores = x @ x.mT - candidates.square().sum(-1)
    return (scores.softmax(-1).unsqueeze(-1) * candidates.softmax(-1)).sum(2)


READ: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {  # the inputs of the program, and its axes
    "a vector and its norm": (lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6), 1, 3),
    "normalize": (lambda x: F.normalize(x, dim=-1), 1, 3),
    "two sums": (lambda x: x.exp() * x.sum(1, keepdim=True) + x.mean(2, keepdim=True), 1, 3),
    "by way of views": (lambda x: (x.unsqueeze(1) * x.square().sum(2)[:, None, :, None]).squeeze(1), 1, 3),
    "all pairs": (distances, 2, 4),
    "expanded": (weighted, 2, 4),
    "summed along what is expanded": (
        lambda x: (x.unsqueeze(1).expand(-1, N, -1, -1).exp().sum(1) * 2 + 1).tanh(),
        1,
        4,
    ),
    "a square and its transpose": (lambda x: by_its_transpose(x[:, :, :N].cumsum(1)), 2, 3),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("function", "reads", "axes"), READ.values(), ids=READ)
def test_a_tensor_is_read_along_the_same_axes(
    function: Callable[[Tensor], Tensor], reads: int, axes: int, gradients: bool
) -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x.cumsum(1))

    model, given = Reading(), torch.randn(B, N, D)
    with torch.set_grad_enabled(gradients):
        fast = optimize(model, (given,), Config(verify="full", tune="off", disable=ONLY))
        calls = fast._fxopt.entries[0].executable.graph.graph.find_nodes(
            op="call_function", target=torch.ops.fxopt.pointwise.default
        )
        for rows in (1, 3, 0):
            given = torch.randn(rows, N, D, requires_grad=gradients)
            torch.testing.assert_close(fast(given), model(given))
    if gradients:
        given = torch.randn(3, N, D, requires_grad=True)
        found, expected = (torch.autograd.grad(net(given).sum(), given) for net in (fast, model))
        torch.testing.assert_close(found, expected)
    plan = plan_of(calls[-1].args[1])
    assert (len(plan.inputs), plan.axes) == (reads, axes)


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product of vectors": lambda x: (x.view(-1) * 2) @ x.view(-1),
    "the norm of a number": lambda x: F.normalize(x.sum().exp() * 2, dim=0),
    "the softmax of a number": lambda x: (x.mean() * 2).relu().softmax(0) * x,
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_results_without_dims(function: Callable[[Tensor], Tensor]) -> None:
    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with torch.no_grad():
        fast = optimize(Numbers(), (torch.randn(4, 5),), Config(tune="off"))
        for rows in (4, 1, 3):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(fast(x), function(x))
    (findings,) = fast._fxopt.findings
    assert not [miss.reason for ran in findings.passes for miss in ran.misses if "failed" in miss.reason]
