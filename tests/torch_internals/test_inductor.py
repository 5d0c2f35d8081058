"""Inductor's inner doors: a graph of ATen operators in, a function of a list out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.inductor import compile_both, compile_forward
from fxopt.torch_internals.shape_env import TraceShapeEnv


def doubled(x: torch.Tensor) -> tuple:
    return (torch.ops.aten.mul.Tensor(x, 2.0),)


@pytest.fixture
def example() -> tuple[FakeTensorMode, torch.Tensor]:
    mode = FakeTensorMode(shape_env=TraceShapeEnv())
    with mode:
        return mode, torch.empty(3, 4)


@pytest.mark.slow
def test_a_forward_is_compiled(example: Any) -> None:
    run = compile_forward(doubled, [example[1]], example[0])
    assert run((torch.ones(3, 4),))[0].tolist() == [[2.0] * 4] * 3, (
        "compile_fx_inner takes or gives something else: fxopt/lowering/inductor.py compiles islands by it"
    )


@pytest.mark.slow
def test_a_backward_is_compiled_and_refused_where_it_has_none(example: Any) -> None:
    x = torch.ones(3, 4, requires_grad=True)
    run = compile_both(doubled, [example[1]], example[0], [True])
    run((x,))[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 4] * 3, (
        "compile_fx gives no backward: fxopt/lowering/inductor.py compiles training captures by it"
    )
    run = compile_both(doubled, [example[1]], example[0], [False])
    with pytest.raises(AssertionError):
        run((x,))
