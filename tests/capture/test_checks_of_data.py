"""Forwards that check their data: the graph asks, and what the model raises is raised by eager.

PYTEST_DONT_REWRITE: asserts are those that Python makes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.runtime import dispatcher_of
from fxopt.shape.conditions import require

ROWS = 10
CONFIG = Config(tune="off")


class Model(nn.Module):
    def __init__(self, before: Callable[[Tensor], Any], behind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(ROWS, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.out = nn.Linear(4, 2)
        self.before, self.behind = before, behind

    def forward(self, ids: Tensor) -> Tensor:
        self.before(ids)
        y = self.out(self.drop(self.norm(self.table(ids % ROWS))))
        self.behind(y)
        return y


def nothing(x: Tensor) -> None: ...


def asserted(x: Tensor) -> None:
    assert (x >= 0).all() and (x < ROWS).all(), f"ids from {x.min()} to {x.max()}"


def raised(x: Tensor) -> None:
    if (x < 0).any() or x.max() >= ROWS:
        raise ValueError(f"ids to {x.max()}")


def of_numbers(x: Tensor) -> None:
    low, high = x.min().item(), x.max().item()
    if low < 0 or high >= ROWS:
        raise IndexError(f"ids {low} to {high}")


def of_floats(x: Tensor) -> None:
    if x.float().mean().item() > 7.5:
        raise ValueError("too large in the mean")


def of_a_count(x: Tensor) -> None:
    count = (x > 0).sum()
    if not count:
        raise RuntimeError("nothing but zeros")


def finite(y: Tensor) -> None:
    assert torch.isfinite(y).all(), "not finite"


def no_nan(y: Tensor) -> None:
    if torch.isnan(y).any():
        raise FloatingPointError("NaN")


CHECKS = {
    "assert": (asserted, nothing),
    "raise": (raised, nothing),
    "numbers": (of_numbers, nothing),
    "floats": (of_floats, nothing),
    "a count": (of_a_count, nothing),
    "finite": (nothing, finite),
    "no NaN": (nothing, no_nan),
    "both": (raised, no_nan),
}
CALLS = [
    torch.tensor([1, 2, 3, 4, 5]),
    torch.tensor([3, -1, 2]),
    torch.tensor([10, 4]),
    torch.tensor([0, 0, 0, 0]),
    torch.tensor([9, 9, 9]),
    torch.tensor([7, 1, 0, 2]),
]


def outcome(model: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(0)
    try:
        y = model(x)
    except Exception as error:
        return type(error), str(error)
    finally:
        drawn = torch.rand(1)  # as much was drawn before
    return y.detach(), drawn


def assert_alike(model: nn.Module, fast: nn.Module) -> None:
    for x in CALLS:
        expected, found = outcome(model, x), outcome(fast, x)
        if isinstance(expected[0], type):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(dict(fast.named_buffers()), dict(model.named_buffers()), equal_nan=True)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("training", [True, False])
def test_errors_and_effects_are_eagers(name: str, training: bool) -> None:
    model = Model(*CHECKS[name]).train(training)
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    assert_alike(model, fast)
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
    assert any(node.target is require for node in entry.executable.capture.graph.graph.nodes)
    with torch.no_grad():
        for each in (model, fast):
            each.out.weight[0] = float("nan")  # type: ignore[index, union-attr]
    assert_alike(model, fast)


def test_a_check_that_fails_at_first() -> None:
    model = Model(raised, no_nan).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for x in (CALLS[2], CALLS[1], CALLS[0], CALLS[5], CALLS[2], CALLS[0]):
        assert str(outcome(fast, x)) == str(outcome(model, x))
    assert any(entry.executable is not None for entry in dispatcher_of(fast).entries)


def test_gradients() -> None:
    model = Model(asserted, finite).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for each in (model, fast):
        each(CALLS[0]).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)


def test_under_dynamo() -> None:
    model = Model(raised, no_nan).eval()
    compiled = torch.compile(optimize(model, CALLS[0], CONFIG), backend="eager")
    for x in CALLS:
        expected, found = outcome(model, x), outcome(compiled, x)
        assert str(found) == str(expected)


class Sampling(nn.Module):
    """torch.distributions checks what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, log.exp(), validate_args=True)  # Dynamo changes the default
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=True)
        return self.decoder(posterior.rsample()), torch.distributions.kl_divergence(posterior, prior).sum(-1)


def test_distributions() -> None:
    model = Sampling()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for x in (torch.rand(5, 6), torch.rand(2, 6), torch.full((3, 6), float("nan"))):
        results = []
        for each in (model, fast):
            torch.manual_seed(1)
            try:
                results.append(each(x))
            except ValueError as error:
                results.append(str(error))
        if isinstance(results[0], str):
            assert results[1] == results[0]
        else:
            torch.testing.assert_close(results[1], results[0])
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
