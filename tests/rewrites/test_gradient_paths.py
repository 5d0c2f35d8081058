"""Who requires gradients, and who gets zeros and who nothing, is as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites.framework.editor import Rejected
from fxopt.rewrites.framework.gradient_paths import GradientPaths

Forward = Callable[["Model", Tensor, Tensor], "Tensor | tuple[Tensor, ...]"]


class Model(nn.Module):
    """Towers of features [B, F, D], and tables of ids [B, F]; the first table is frozen where asked."""

    def __init__(self, function: Forward, frozen: bool = False) -> None:
        super().__init__()
        self.function = function
        self.towers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(4))
        self.tables[0].requires_grad_(not frozen)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, x, ids)

    def rows(self, ids: Tensor, *tables: int) -> list[Tensor]:
        return [self.tables[t](ids[:, t]) for t in tables]

    def layers(self, x: Tensor) -> list[Tensor]:
        return [tower(x[:, i]) for i, tower in enumerate(self.towers)]


MODELS: dict[str, Forward] = {
    "one of a stack": lambda m, x, ids: torch.stack(m.layers(x), 1)[:, 2],
    "some of a stack": lambda m, x, ids: torch.stack(m.layers(x), 1)[:, 1:3] * 2,
    "one of a stack's pieces": lambda m, x, ids: torch.stack(m.layers(x), 1).unbind(1)[1] * 2,
    "a piece of a cat": lambda m, x, ids: torch.relu(torch.cat(m.rows(ids, 0, 1, 2), 1)[:, 4:8]),
    "a piece of a cat across two": lambda m, x, ids: torch.cat(m.rows(ids, 0, 1, 2), 1)[:, 2:6],
    "one of a cat's pieces": lambda m, x, ids: torch.cat(m.layers(x), 1).split(4, 1)[2].sigmoid(),
    "nothing of a table": lambda m, x, ids: torch.cat([m.rows(ids, 0)[0], m.rows(ids, 1)[0][:, :0]], 1),
    "times zero": lambda m, x, ids: m.rows(ids, 0)[0] + 0 * m.rows(ids, 1)[0],
    "zeros of its form": lambda m, x, ids: m.rows(ids, 0)[0] + torch.zeros_like(m.rows(ids, 1)[0]),
    "a condition": lambda m, x, ids: torch.where(torch.sigmoid(m.rows(ids, 2)[0]) >= 0.5, *m.rows(ids, 0, 1)),
    "a comparison": lambda m, x, ids: (torch.cat(m.rows(ids, 0, 1), 1) > 0).float().mean(1),
    "not a number": lambda m, x, ids: torch.isnan(m.rows(ids, 0)[0] * 3).float().sum(1),
    "a comparison beside a sum": lambda m, x, ids: (y := m.layers(x)[0] * 2, ((y > 0).float() + 1).sum(1)),
    "detached": lambda m, x, ids: ((torch.cat(m.rows(ids, 0, 1), 1) * 2).detach().sum(1), m.rows(ids, 2)[0]),
    "two outputs": lambda m, x, ids: (torch.cat(m.rows(ids, 0, 1), 1), torch.cat(m.rows(ids, 2, 3), 1)),
    "three lookups": lambda m, x, ids: tuple(m.rows(ids, 0, 1, 2)),
    "a tower each": lambda m, x, ids: tuple(m.layers(x)),
    "the same table twice": lambda m, x, ids: (m.tables[0](ids), torch.cat(m.rows(ids, 1, 2), 1)),
}


def _gradients(model: Model, inputs: tuple[Tensor, ...], loss_of: int | None) -> tuple[list[bool], list[Tensor | None]]:
    for parameter in model.parameters():
        parameter.grad = None
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    read = outputs if loss_of is None else outputs[loss_of : loss_of + 1]
    for output in read:
        if output.requires_grad:
            output.backward(torch.ones_like(output), retain_graph=True)
    return [output.requires_grad for output in outputs], [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("loss_of", [None, 0])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("function", MODELS.values(), ids=MODELS.keys())
def test_gradients_are_eagers(function: Forward, frozen: bool, loss_of: int | None) -> None:
    torch.manual_seed(0)
    model = Model(function, frozen)
    fast = copy.deepcopy(model)
    inputs = [(torch.randn(B, 4, 4), torch.randint(0, 10, (B, 4))) for B in (5, 3, 1, 0)]
    fast = optimize(fast, inputs[0], Config(verify="off", tune="off"))
    for given in inputs:
        expected, found = (_gradients(each, given, loss_of) for each in (model, fast))
        assert found[0] == expected[0], "outputs that require a gradient"
        for (name, _), old, new in zip(model.named_parameters(), expected[1], found[1], strict=True):
            assert (new is None) == (old is None), f"{name}: None where the other is zeros"
            if old is not None:
                torch.testing.assert_close(new, old, msg=name)
    assert fast._fxopt.entries[0].executable is not None


def test_inputs_that_ask_for_gradients_are_sources() -> None:
    model = Model(lambda m, x, ids: torch.relu(x) * 2)
    given = torch.randn(5, 4, 4, requires_grad=True), torch.randint(0, 10, (5, 4))
    (entry,) = optimize(model, given, Config(verify="off", tune="off"))._fxopt.entries
    graph = entry.executable.graph.graph
    paths = GradientPaths(graph)
    (result,) = graph.output_node().all_input_nodes
    assert paths.reach(result)
    with pytest.raises(Rejected):
        paths.keep({result: next(node for node in graph.nodes if node.op == "placeholder" and not paths.reach(node))})


def test_tables_may_be_edited_between_forward_and_backward() -> None:
    """A lookup's gradient needs its ids alone."""
    model = Model(lambda m, x, ids: torch.cat(m.rows(ids, 0, 1, 2), 1))
    fast = optimize(copy.deepcopy(model), config=Config(verify="off", tune="off"))
    given = torch.randn(5, 4, 4), torch.randint(0, 10, (5, 4))
    for each in (model, fast):
        result = each(*given)
        with torch.no_grad():
            for table in each.tables.parameters():
                table.add_(1)
        result.sum().backward()
    for old, new in zip(model.tables.parameters(), fast.tables.parameters(), strict=True):
        assert (old.grad is None) == (new.grad is None)
        if old.grad is not None:
            torch.testing.assert_close(new.grad, old.grad)
