"""torch.export with sizes of 0 and 1 as any others. fxopt/export depends on it: programs serve one row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

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
