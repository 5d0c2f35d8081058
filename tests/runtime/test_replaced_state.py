"""The dicts of a module's parameters and buffers may be replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(2))
        self.layer = nn.Linear(8, 1)
        self.register_buffer("shift", torch.rand(1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        return self.layer(rows) + self.shift


def exchange(model: Any) -> None:
    one, other = model.tables
    one._parameters, other._parameters = other._parameters, one._parameters


WAYS: dict[str, Callable[[Any], Any]] = {
    "__init__ again": lambda m: m.layer.__init__(8, 1),
    "tables that change places": exchange,
    "new buffers": lambda m: setattr(m, "_buffers", {"shift": torch.rand(1)}),
    "the state of another": lambda m: m.layer.__setstate__(vars(nn.Linear(8, 1))),
    "the attributes of another": lambda m: vars(m.layer).update(vars(nn.Linear(8, 1))),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_reads_the_new_ones(way: str) -> None:
    model, ids = Model().eval(), torch.randint(0, 20, (5, 2))
    optimized = optimize(model, (ids,))
    with torch.no_grad():
        before = optimized(ids)
        for _ in range(2):
            WAYS[way](model)
            for _ in range(3):
                torch.testing.assert_close(optimized(ids), model(ids))
            assert not torch.equal(optimized(ids), before)
            before = optimized(ids)
