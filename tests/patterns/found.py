"""What the embedding-columns pass makes of a model, and that the numbers stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt.config import Config
from fxopt.findings import PassFindings
from fxopt.kernels.columns.encode import plan_of
from fxopt.kernels.columns.op import load
from fxopt.kernels.columns.plan import Plan
from fxopt.optimize import compile
from fxopt.runtime import Executable

OFF = Config(verify="off", disable=("row_chunks",))  # which would hide the columns calls


class Spelling(nn.Module):
    """A model of one forward and the tables that most spellings need: `e` and `f` [20, 4], `w` [20, 4], `bag`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.e = nn.Embedding(20, 4)
        self.f = nn.Embedding(20, 4)
        self.w = nn.Parameter(torch.randn(20, 4))
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")
        self.register_buffer("edges", torch.linspace(-1, 1, 19))
        self.spelled = forward

    def forward(self, *args: Tensor) -> Any:
        return self.spelled(self, *args)


def executable(model: nn.Module, args: Sequence[Tensor], grad: bool = False, config: Config = OFF) -> Executable:
    with torch.set_grad_enabled(grad):
        return compile(config, model, tuple(args), {})


def plans(made: Executable) -> list[Plan]:
    """The plan of every columns call, in graph order."""
    load()
    module = made.graph
    assert module is not None
    calls = [node for node in module.graph.nodes if node.target is torch.ops.fxopt.columns.default]
    return [plan_of(getattr(module, str(call.args[2].target))) for call in calls]  # type: ignore[union-attr]


def findings(made: Executable, name: str = "embedding_columns") -> PassFindings:
    return next(ran for ran in made.findings.passes if ran.name == name)


def assert_eager(made: Executable, model: nn.Module, args: Sequence[Tensor]) -> None:
    """The same numbers as eager, up to rounding, on these inputs."""
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*args))
        found = made.run(*_state(made, model), *args)
    torch.testing.assert_close(list(found), expected, equal_nan=True)


def assert_eager_gradients(model: nn.Module, args: tuple[Tensor, ...], scale: float = 1.0) -> Plan:
    """Of every parameter and every float argument, in one columns call, whose plan it returns."""
    args = tuple(arg.requires_grad_() if arg.is_floating_point() else arg for arg in args)
    made = executable(model, args, grad=True)
    (plan,) = plans(made)
    leaves = [*model.parameters(), *(arg for arg in args if arg.requires_grad)]
    expected, (found,) = model(*args), made.run(*_state(made, model), *args)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.manual_seed(0)
    direction = torch.randn(expected.shape) * scale
    theirs = torch.autograd.grad(expected, leaves, direction, allow_unused=True)
    ours = torch.autograd.grad(found, leaves, direction, allow_unused=True)
    assert any(grad is not None for grad in theirs)
    for eager, own in zip(theirs, ours, strict=True):
        if eager is not None:
            torch.testing.assert_close(own, eager, equal_nan=True)
        else:
            assert own is None or not own.any()
    return plan


def _state(made: Executable, model: nn.Module) -> list[Tensor]:
    return [getattr(model.get_submodule(slot.module), slot.name) for slot in made.capture.state]
