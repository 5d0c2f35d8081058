"""Results are copied where backward needs what is returned, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize

aten = torch.ops.aten


class Model(nn.Module):
    """A layer of x [B, 4], a table of ids [B] and a vector."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(10, 4)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return self.function(self, x, ids)


def copies(function: Callable, grad: bool = True) -> int:
    """How many tensors the optimized graph copies."""
    x, ids = torch.randn(3, 4), torch.randint(0, 10, (3,))
    with torch.set_grad_enabled(grad):
        fast = optimize(Model(function), (x, ids), Config(verify="off", tune="off"))
    (entry,) = fast._fxopt.entries  # type: ignore[union-attr]
    return len(entry.executable.graph.graph.find_nodes(op="call_function", target=aten.clone.default))


def fused(model: Model, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    hidden = model.layer(x)
    return hidden, torch.sigmoid(hidden + model.w) * 2 + 1


def test_a_result_that_a_fused_program_keeps_is_copied() -> None:
    assert copies(fused) == 1


def test_nothing_is_kept_without_gradients() -> None:
    assert copies(fused, grad=False) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x, ids: (torch.sigmoid(model.layer(x)),),
        lambda model, x, ids: (model.layer(x).relu(), model.w),
        lambda model, x, ids: (model.table(ids).sum(1), model.table.weight, model.layer.weight),
        lambda model, x, ids: (model.layer(model.table(ids)), ids, x.shape[0]),
    ],
    ids=["activation", "vector", "table", "ids and a number"],
)
def test_what_eager_keeps_or_nobody_edits_is_not_copied(function: Callable) -> None:
    assert copies(function) == 0
