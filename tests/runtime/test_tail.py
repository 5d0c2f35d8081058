"""The last product of a call, which is computed behind a replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of
from fxopt.runtime.tail import Tail

ITEMS = 20_000
Scores = Callable[[Tensor, Tensor, Tensor], object]  # of users, and the items' vectors and biases


class Users(nn.Module):
    """A tower, and what `scores` makes of its users and the items."""

    def __init__(self, scores: Scores, items: int = ITEMS) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.items, self.bias = nn.Embedding(items, 8), nn.Parameter(torch.randn(items))
        self.scores = scores

    def forward(self, x: Tensor) -> object:
        return self.scores(self.tower(x), self.items.weight, self.bias)


def cut(model: nn.Module, *inputs: Tensor) -> tuple[Tail, Callable[..., list[Tensor]]]:
    """The tail of a model, and its calls in two parts."""
    fast = fxopt.optimize(model, inputs, fxopt.Config(tune="off", disable=("linear_chains", "towers", "row_chunks")))
    executable = dispatcher_of(fast).entries[0].executable
    tail = Tail(executable)
    state = [slot.read(model) for slot in executable.capture.state]
    graph = tail.executable.graph
    assert graph is not None
    return tail, lambda *given: list(tail.put(graph(*state, *given), state))


BEHIND: dict[str, Scores] = {
    "matmul": lambda users, items, bias: users @ items.T,
    "linear": lambda users, items, bias: nn.functional.linear(users, items, bias),
    "activated": lambda users, items, bias: (users @ items.T).sigmoid(),
    "with the users": lambda users, items, bias: (users, users @ items.T),
    "two of them": lambda users, items, bias: [users @ items.T, users @ items[1:].T],
}
WITHIN: dict[str, Scores] = {
    "read once more": lambda users, items, bias: [y := users @ items.T, y.amax(1)],
    "read before": lambda users, items, bias: (users @ items.T).softmax(1).cumsum(1) + users.repeat(1, ITEMS // 8),
    "one of the other": lambda users, items, bias: [users @ items.T, 2 - users @ items.T],
    "twice the same": lambda users, items, bias: (y := users @ items.T, y),
}


@pytest.mark.parametrize("name", BEHIND)
def test_behind(name: str) -> None:
    model = Users(BEHIND[name])
    with torch.no_grad():
        tail, run = cut(model, torch.randn(5, 6))
        assert tail.executable.graph is not None
        calls = tail.executable.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        assert len(calls) == 1  # the tower
        for rows in (1, 3, 8):
            x = torch.randn(rows, 6)
            expected = model(x)
            found = run(x)
            torch.testing.assert_close(found, [expected] if isinstance(expected, Tensor) else list(expected))


@pytest.mark.parametrize("name", WITHIN)
def test_within(name: str) -> None:
    """Where somebody else reads it, or it reads as much as it makes."""
    with torch.no_grad():
        tail, _ = cut(Users(WITHIN[name]), torch.randn(5, 6))
    assert not tail._calls


def test_few_items() -> None:
    with torch.no_grad():
        tail, _ = cut(Users(BEHIND["linear"], items=100), torch.randn(5, 6))
    assert not tail._calls


def test_of_an_input() -> None:
    """The graph has nothing to return."""
    layer = nn.Linear(6, ITEMS)
    with torch.no_grad():
        tail, _ = cut(layer, torch.randn(5, 6))
    assert not tail._calls
