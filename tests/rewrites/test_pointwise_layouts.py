"""Pointwise chains over inputs of the model: results that lie as eager's do, whatever the inputs' strides are."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.capture import capture
from fxopt.capture.guards import Guards
from fxopt.runtime import dispatcher_of

CONFIG = Config(tune="off", disable=("row_chunks",))  # which would hide the calls that are counted


class HandWrittenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.scale * centered / (x.std(-1, keepdim=True) + 1e-3) + self.shift


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = x * torch.sigmoid(layer(y)) * 2 + y
        return y


class Gated(nn.Module):
    """Two inputs, one of which alone decides how the result lies."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.sigmoid(gate) * x + torch.tanh(gate)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "of one row": lambda x: x[:1],
    "empty": lambda x: x[:0],
}


def compared(model: nn.Module, fast: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        expected, found = model(*inputs), fast(*inputs)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def calls(fast: nn.Module) -> list[int]:
    """For each capture the number of its pointwise calls."""
    graphs = [entry.executable.graph.graph for entry in dispatcher_of(fast).entries if entry.executable is not None]
    return [sum("fxopt.pointwise" in str(node.target) for node in graph.nodes) for graph in graphs]


@pytest.mark.parametrize("make", [HandWrittenNorm, Cross])
@pytest.mark.parametrize("first", ["contiguous", "transposed"])
def test_results_lie_as_eagers(make: Callable[[], nn.Module], first: str) -> None:
    model = make().eval()
    fast = optimize(model, config=CONFIG)
    for name in (first, *LAYOUTS):
        compared(model, fast, LAYOUTS[name](torch.rand(5, 3, 6)))
    assert 1 in calls(fast) or 2 in calls(fast)


@pytest.mark.parametrize("first", ["contiguous", "transposed"])
def test_each_layout_has_its_capture(first: str) -> None:
    model = HandWrittenNorm().eval()
    fast = optimize(model, config=CONFIG)
    for name in (first, "transposed", "contiguous", "transposed"):
        compared(model, fast, LAYOUTS[name](torch.rand(5, 3, 6)))
    assert sorted(calls(fast)) == [0, 1]


class Sum(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return torch.tanh(sum(torch.sigmoid(part) * 2 for part in parts))  # type: ignore[arg-type]


def test_many_layouts_are_few_captures() -> None:
    model = Sum()
    fast = optimize(model, config=CONFIG)
    for mask in range(32):
        names = ["transposed" if mask & (1 << place) else "contiguous" for place in range(5)]
        compared(model, fast, *(LAYOUTS[name](torch.rand(5, 3, 6)) for name in reversed(names)))
    assert len(calls(fast)) <= 2


def test_each_input_is_asked_for_itself() -> None:
    model = Gated().eval()
    fast = optimize(model, config=CONFIG)
    for x in LAYOUTS.values():
        for gate in LAYOUTS.values():
            one, other = x(torch.rand(5, 3, 6)), gate(torch.rand(5, 3, 6))
            if len(one) == len(other):
                compared(model, fast, one, other)


def test_gradients() -> None:
    model = Cross()
    fast = optimize(model, config=CONFIG)
    for name in LAYOUTS:
        x = torch.rand(5, 3, 6)
        grads = []
        for module in (model, fast):
            leaf = LAYOUTS[name](x).detach().requires_grad_()
            module(leaf).square().sum().backward()
            grads.append([leaf.grad, *(parameter.grad for parameter in model.parameters())])
            model.zero_grad(set_to_none=True)
        torch.testing.assert_close(grads[1], grads[0])


def test_under_dynamo() -> None:
    model = HandWrittenNorm().eval()
    compiled = torch.compile(optimize(model, torch.rand(5, 3, 6), CONFIG), backend="eager")
    for name in LAYOUTS:
        compared(model, compiled, LAYOUTS[name](torch.rand(5, 3, 6)))


def test_guards_say_so() -> None:
    fast = optimize(HandWrittenNorm().eval(), torch.rand(5, 3, 6), CONFIG)
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
    guards = entry.executable.capture.guards
    assert guards.whole == (0,)
    assert "x0.is_contiguous()" in guards.describe()
    kept: Guards = pickle.loads(pickle.dumps(guards))
    assert kept.holds([torch.rand(4, 3, 6)])
    assert not kept.holds([torch.rand(3, 4, 6).transpose(0, 1)])


def test_what_is_computed_behind_layers_asks_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), HandWrittenNorm()).eval()
    fast = optimize(model, torch.rand(5, 3, 6), CONFIG)
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
    assert entry.executable.capture.guards.whole == ()
    assert calls(fast) == [1]


def test_a_capture_alone_takes_nothing_for_granted() -> None:
    assert capture(HandWrittenNorm(), (torch.rand(5, 3, 6),)).guards.whole == ()
