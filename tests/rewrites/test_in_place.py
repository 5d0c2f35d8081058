"""Memory that is read for the last time is written over, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.rewrites.framework.in_place import in_place_overload, reuse_memory
from fxopt.shape.aliases import mutates

aten = torch.ops.aten
X = torch.randn(5, 4)


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.spelled = forward

    def forward(self, x: Tensor) -> Any:
        return self.spelled(self, x)


@torch.no_grad()
def edits(forward: Callable[..., Any]) -> list[str]:
    """The edits of the graph; its answers and its input are checked against eager, call after call."""
    model = Model(forward)
    captured = capture(model, (X,))
    normalize(captured.graph, inference=True)
    reuse_memory(captured.graph.graph)
    captured.graph.recompile()
    for batch in (5, 1, 0, 5):
        x, other = X[:batch].clone(), X[:batch].clone()
        expected = model(x)
        found = captured.graph(*[slot.read(model) for slot in captured.state], other)
        for left, right in zip(found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            assert torch.equal(left, right)
        assert torch.equal(x, other)
    return _edits(captured.graph)


def _edits(module: GraphModule) -> list[str]:
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and mutates(node)]
    return [node.target._schema.name.removeprefix("aten::") for node in nodes]


REUSED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a chain": (lambda m, x: m.linear(m.linear(x).relu().mul(2).sigmoid()) * 1, ["relu_", "mul_", "sigmoid_"]),
    "twice the same": (lambda m, x: (lambda y: m.linear(y * y))(m.linear(x)), ["mul_"]),
    "a view": (lambda m, x: F.linear(m.linear(x).view(-1, 2).relu(), x.new_ones(2, 2)), ["relu_"]),
    "a smaller other": (lambda m, x: m.linear(m.linear(x) + x.sum(1, keepdim=True)), ["add_"]),
}


@pytest.mark.parametrize("name", REUSED)
def test_memory_that_dies_is_reused(name: str) -> None:
    forward, expected = REUSED[name]
    assert edits(forward) == expected


STAY: dict[str, Callable[..., Any]] = {
    "a view that repeats": lambda m, x: x.sin().unsqueeze(-1).expand(-1, -1, 3).reshape(-1, 3).add(1).sum(1),
    "an input": lambda m, x: m.linear(x.relu()),
    "a view of an input": lambda m, x: m.linear(x.view(-1, 4).relu()),
    "what may be an input": lambda m, x: m.linear(x.reshape(-1, 4).contiguous().relu()),
    "a parameter": lambda m, x: F.linear(x, m.linear.weight.relu()),
    "read later": lambda m, x: (lambda y: m.linear(y.relu()) + y.sum())(m.linear(x)),
    "a view is read later": lambda m, x: (lambda y: m.linear(y.relu()) + y[:, :1].exp().sum())(m.linear(x)),
    "an output": lambda m, x: (lambda y: (y, m.linear(y.relu())))(m.linear(x)),
    "the result is an output": lambda m, x: m.linear(x).relu(),
    "the other argument is a view of it": lambda m, x: (lambda y: m.linear(y * y[:, :1]))(m.linear(x)),
    "a larger result": lambda m, x: (m.linear(x)[:, :1].contiguous() + x).sum(1),
    "another dtype": lambda m, x: (m.linear(x) > 0).long().add(1.5).sum(1),
    "a comparison": lambda m, x: (m.linear(x) == 0).sum(1),
    "expanded": lambda m, x: m.linear(x).sum(1, keepdim=True).expand(-1, 4).relu().sum(1),
}


@pytest.mark.parametrize("name", STAY)
def test_memory_that_others_can_see_is_not(name: str) -> None:
    assert edits(STAY[name]) == []


def test_with_gradients_nothing_is_written_over() -> None:
    model = Model(lambda m, x: m.linear(m.linear(x).sigmoid() * 2) * 1)
    fast = fxopt.optimize(model, (X,))
    fast(X).sum().backward()
    expected = Model(model.spelled)
    expected.load_state_dict(model.state_dict())
    expected(X).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)


@torch.no_grad()
def test_where_forward_turns_gradients_on_nothing_is_written_over() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return m.linear(m.linear(x).sigmoid().exp() * 2)

    model = Model(forward)
    fast = fxopt.optimize(model, (X,))
    expected, found = (torch.autograd.grad(net(X), list(model.parameters()), X) for net in (model, fast))
    torch.testing.assert_close(found, expected)


def test_the_in_place_operator_of_an_overload() -> None:
    assert in_place_overload(aten.relu.default) is aten.relu_.default
    assert in_place_overload(aten.mul.Scalar) is aten.mul_.Scalar
    assert in_place_overload(aten.where.self) is None
    assert in_place_overload(aten.relu_.default) is None
    assert in_place_overload(aten.cat.default) is None
