"""Small models, and a compile that captures without rewriting, for the runtime's tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxopt.findings import Findings
from fxopt.runtime import Executable


def plain_compile(model: nn.Module, args: tuple, kwargs: dict) -> Executable:
    from fxopt.capture import capture

    captured = capture(model, args, kwargs)
    return Executable(captured, captured.graph.forward, Findings(signature="plain"))


class Tower(nn.Module):
    """Two tables, a dense input, dropout and batch norm: every kind of state and both modes matter."""

    def __init__(self, rows: int = 11, dim: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, dim) for _ in range(2)])
        self.norm = nn.BatchNorm1d(2 * dim + 3)
        self.drop = nn.Dropout(0.5)
        self.top = nn.Linear(2 * dim + 3, 1)
        self.scale = 1.0

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        columns = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = self.norm(torch.cat([dense, *columns], dim=1))
        return self.top(self.drop(x)) * self.scale


def tower_inputs(batch: int = 6, rows: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3), torch.randint(0, rows, (batch, 2))
