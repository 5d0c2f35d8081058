"""torch.export with sizes of 0 and 1 as any others. fxopt/export depends on it: programs serve one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxopt.torch_internals.exporting import ProgramShapeEnv, demanding, either_of, exported


class Wide(nn.Module):
    """A view of a transposed batch asks for sizes of 1, to choose strides."""

    def forward(self, x: Tensor) -> Tensor:
        with demanding():
            if x.shape[0] > 40:
                return x
        wide = x.unsqueeze(2).expand(-1, -1, 3).reshape(x.shape[0], 6)
        return either_of(x.shape[0] <= 4, torch.sin, torch.cos, (wide,))


def test_one_row_and_none_are_no_special_cases() -> None:
    program = exported(Wide(), (torch.zeros(7, 2),), {}, {"x": {0: Dim.DYNAMIC}}, {})
    for rows in (0, 1, 4, 5, 40):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(program.module()(x), Wide()(x))


class Choosing(nn.Module):
    """Of what torch.cond takes no input: a size, a constant, nothing, and numbers that are no size."""

    def __init__(self, rest: Callable[[Tensor, Tensor], list[Any]]) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return either_of(x.shape[0] <= 4, self.few, self.many, (x, self.rest(x, y)))

    def few(self, x: Tensor, rest: list[Any]) -> Tensor:
        return self.of(x.sin(), rest)

    def many(self, x: Tensor, rest: list[Any]) -> Tensor:
        return self.of(x.cos(), rest)

    def of(self, x: Tensor, rest: list[Any]) -> Tensor:
        for each in rest:
            x = x if each is None else torch.ops.aten.add.Tensor(x, each)
        return x


def chosen(model: Choosing) -> ExportedProgram:
    open_dims = {0: Dim.DYNAMIC}
    return exported(model, (torch.zeros(7, 2), torch.zeros(9, 2)), {}, {"x": open_dims, "y": open_dims}, {})


def conds(program: ExportedProgram) -> int:
    return sum(node.target is torch.ops.higher_order.cond for node in program.graph.nodes)


@pytest.mark.parametrize(
    "rest",
    [
        lambda x, y: [y.shape[0], 3 * x.shape[0] + y.shape[0] // 2],
        lambda x, y: [7, None, 0.5, y.sum(), y.shape[0], 1, True],
    ],
)
def test_branches_take_sizes_and_constants(rest: Callable[[Tensor, Tensor], list[Any]]) -> None:
    program = chosen(Choosing(rest))
    assert conds(program) == 1
    for rows, others in itertools.product((0, 1, 4, 5, 40), (0, 1, 6)):
        x, y = torch.randn(rows, 2), torch.randn(others, 2)
        torch.testing.assert_close(program.module()(x, y), Choosing(rest)(x, y))


@pytest.mark.parametrize(
    "rest",
    [
        lambda x, y: [y.shape[0] - 1],
        lambda x, y: [torch.sym_float(y.shape[0])],
        lambda x, y: list(y.sum(0).split(1)),
    ],
    ids=["may be negative", "float", "share memory"],
)
def test_what_no_branch_takes_leaves_one_side_for_all(rest: Callable[[Tensor, Tensor], list[Any]]) -> None:
    model = Choosing(rest)
    program = chosen(model)
    assert conds(program) == 0
    for rows, others in itertools.product((0, 1, 5), (0, 1, 6)):
        x, y = torch.randn(rows, 2), torch.randn(others, 2)
        torch.testing.assert_close(program.module()(x, y), model.few(x, rest(x, y)))


def test_what_is_demanded_is_a_constraint() -> None:
    program = exported(Wide(), (torch.zeros(7, 2),), {}, {"x": {0: Dim.DYNAMIC}}, {})
    try:
        program.module()(torch.randn(41, 2))
    except (AssertionError, RuntimeError):
        return
    raise AssertionError("expected an error for 41 rows")


def test_the_shape_env_of_an_export_is_ours(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked = []
    own = ProgramShapeEnv.evaluate_expr
    monkeypatch.setattr(
        ProgramShapeEnv, "evaluate_expr", lambda self, *args, **kw: asked.append(args) or own(self, *args, **kw)
    )
    exported(Wide(), (torch.zeros(7, 2),), {}, {"x": {0: Dim.DYNAMIC}}, {})
    assert asked, "torch.export makes its ShapeEnv elsewhere now: see exported()"
