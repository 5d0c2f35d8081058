"""torch.compile of an optimized model traces the optimized graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func

import fxopt
from tests.runtime.models import Tower, tower_inputs


class Structured(nn.Module):
    """A dict in, a float constant, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(7, 3) for _ in range(3)])

    def forward(self, features: dict, scale: float) -> dict:
        rows = [table(features["ids"][:, i]) for i, table in enumerate(self.tables)]
        return {"rows": torch.cat([features["dense"], *rows], 1) * scale}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def targets(counter: CompileCounterWithBackend) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in counter.graphs[-1].graph.nodes]


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not yet"])
def test_one_graph_with_the_optimized_call(captured):
    model = Tower().eval()
    twin = copy.deepcopy(model)
    fast = fxopt.optimize(model, tower_inputs()) if captured else fxopt.optimize(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fast, backend=counter, fullgraph=True)
    for batch in (6, 1, 0, 9, 12):
        inputs = tower_inputs(batch)
        torch.testing.assert_close(compiled(*inputs), twin(*inputs))
        assert "fxopt_graph" in targets(counter)
    assert counter.frame_count <= 4
    assert len(fast._fxopt.entries) <= 2, "torch.compile adds an attribute to the model: a capture of its own"


class Around(nn.Module):
    def __init__(self, fast: nn.Module) -> None:
        super().__init__()
        self.fast = fast

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.fast(*inputs) * 2


def test_alone_it_is_left_to_python():
    model, other = Tower().eval(), Tower().eval()
    twins = copy.deepcopy(model), copy.deepcopy(other)
    counter = CompileCounterWithBackend("eager")
    for fast, twin in zip((fxopt.optimize(model, tower_inputs()), fxopt.optimize(other)), twins, strict=True):
        compiled = torch.compile(fast, backend=counter)
        for batch in (6, 1, 9):
            inputs = tower_inputs(batch)
            out, expected = compiled(*inputs), twin(*inputs)
            torch.testing.assert_close(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
        for (name, p), q in zip(fast.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        with pytest.raises(IndexError):
            compiled(inputs[0], inputs[1] + 100)
    assert counter.frame_count == 0, "neither the model nor what serves it"
    inputs = tower_inputs()
    torch.testing.assert_close(torch.compile(Around(fast), backend=counter)(*inputs), twin(*inputs) * 2)
    assert "fxopt_graph" in targets(counter), "within another model it is one call"


class Asking(nn.Module):
    """What fxopt does not capture."""

    def forward(self, x):
        return x + 1 if float(x.sum()) > 0 else x - 1


def test_alone_what_stays_eager_is_compiled():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fxopt.optimize(Asking()), backend=counter)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(compiled(x), Asking()(x))
    assert counter.frame_count


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_changes_is_traced_again(fullgraph):
    model = Tower().eval()
    twin = copy.deepcopy(model)
    compiled = torch.compile(fxopt.optimize(model, tower_inputs()), backend="eager", fullgraph=fullgraph)
    inputs = tower_inputs()
    compiled(*inputs)
    model.scale = twin.scale = 2.0
    torch.testing.assert_close(compiled(*inputs), twin(*inputs))
    for m in (model, twin):
        m.train()
        m.drop.p = 0.0
    torch.testing.assert_close(compiled(*inputs), twin(*inputs))
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
    with torch.no_grad():
        for m in (model, twin):
            m.eval()
            m.top.weight.mul_(3)
    torch.testing.assert_close(compiled(*inputs), twin(*inputs))


def test_gradients_and_our_operators_behind_aot_autograd():
    seen = []

    def keep(graph, example_inputs):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    model = Tower().eval()
    twin = copy.deepcopy(model)
    fast = fxopt.optimize(model, tower_inputs())
    compiled = torch.compile(fast, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    for batch in (6, 9):
        inputs = tower_inputs(batch)
        out, expected = compiled(*inputs), twin(*inputs)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, msg=name)
    assert any("fxopt.columns" in target for target in seen[0])


@torch.no_grad()
def test_structured_arguments():
    model = Structured().eval()
    features = {"dense": torch.randn(5, 2), "ids": torch.randint(0, 7, (5, 3))}
    expected = model(features, 2.0)["rows"]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fxopt.optimize(model, (features, 2.0)), backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(features, 2.0)["rows"], expected)
    assert "fxopt_graph" in targets(counter)
    torch.testing.assert_close(compiled(features, 3.0)["rows"], expected * 1.5)


def test_errors_are_those_of_eager():
    model = Tower().eval()
    compiled = torch.compile(fxopt.optimize(model, tower_inputs()), backend="eager")
    dense, ids = tower_inputs()
    with pytest.raises(IndexError):
        compiled(dense, ids + 100)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_items_of_a_list_of_modules_come_and_go(fullgraph):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).eval()
    fast, x = fxopt.optimize(model), torch.randn(5, 4)
    compiled = torch.compile(fast, backend="eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(x), model(x))
    del model[1]
    torch.testing.assert_close(compiled(x), model(x))
    model.insert(1, nn.Linear(4, 4))
    torch.testing.assert_close(compiled(x), model(x))
