"""Models of which torch.compile has made something: a part, the whole in place, or a function that they call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(6))
        self.top = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1))


def a_part_replaced(model: nn.Module) -> None:
    model.top = torch.compile(model.top, backend="eager")


def a_part_in_place(model: nn.Module) -> None:
    model.top.compile(backend="eager")


def the_whole_in_place(model: nn.Module) -> None:
    model.compile(backend="eager")


def a_forward(model: nn.Module) -> None:
    model.top.forward = torch.compile(model.top.forward, backend="eager")


def passes(model: nn.Module) -> set[str]:
    return {ran.name for findings in dispatcher_of(model).findings for ran in findings.passes if ran.changes}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("compiled", [a_part_replaced, a_part_in_place, the_whole_in_place, a_forward])
def test_lookups_are_optimized_around_it(compiled: Callable[[nn.Module], None], before: bool) -> None:
    plain = Columns().eval()
    model = copy.deepcopy(plain)
    if before:
        compiled(model)
    fast = fxopt.optimize(model)
    for batch in (4, 1, 3):
        ids = torch.randint(0, 50, (batch, 6))
        with torch.no_grad():
            torch.testing.assert_close(fast(ids), plain(ids))
        if not before:
            compiled(model)
            before = True
    assert "embedding_columns" in passes(fast)
    ids = torch.randint(0, 50, (5, 6))
    for each in (fast, plain):
        each(ids).sum().backward()
    torch.testing.assert_close(fast.tables[2].weight.grad, plain.tables[2].weight.grad)
    torch.testing.assert_close(next(fast.top.parameters()).grad, next(plain.top.parameters()).grad)
    fast.train()
    assert fast.top.training and not torch.equal(fast(ids), fast(ids))
    fast.eval()
    assert torch.equal(fast(ids), fast(ids))


def test_compile_belongs_to_the_module_that_it_is_called_on() -> None:
    model = Columns().eval()
    fast = fxopt.optimize(model)
    fast.compile(backend="eager")
    assert model._compiled_call_impl is None and fast._compiled_call_impl is not None
    ids = torch.randint(0, 50, (4, 6))
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), model(ids))
    assert "embedding_columns" in passes(fast)
    assert copy.deepcopy(fast)._compiled_call_impl is None
    model.compile(backend="eager")
    assert fxopt.optimize(model)._compiled_call_impl is None


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.top(self.table(ids))
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def test_operators_that_compile_themselves_go_on_working() -> None:
    torch._dynamo.reset()
    model, ids = Chosen(), torch.randint(0, 50, (8,))
    with torch.no_grad():
        fast = fxopt.optimize(model)
        for _ in range(2):
            torch.testing.assert_close(fast(ids), model(ids))
        Chosen()(ids)


class Top(nn.Module):  # Dynamo compiles none of torch's own modules in place
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("wraps", [True, False])
def test_a_capture_takes_no_compiled_code_from_others(wraps: bool) -> None:
    torch._dynamo.reset()
    runs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        return lambda *values: runs.append(1) or graph.forward(*values)

    def compiled() -> nn.Module:
        model = Columns().eval()
        model.top = Top()
        if wraps:
            model.top = torch.compile(model.top, backend=backend)
        else:
            model.top.compile(backend=backend)
        return model

    ids = torch.randint(0, 50, (8, 6))
    with torch.no_grad():
        model, other = compiled(), compiled()
        fxopt.optimize(model)(ids)
        for each in (model, other, other):
            runs.clear()
            each(ids)
            assert runs
