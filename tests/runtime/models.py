"""Small models, and a compile that captures without rewriting, for the runtime's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxopt.capture import Capture, capture
from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.runtime import Executable, optimized

DEFAULT = Config()


class Recorder:
    """A compile that counts captures and graph runs, so that a test can tell an optimized call from an eager one."""

    def __init__(self) -> None:
        self.captures = 0
        self.runs = 0

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict, earlier: list[Capture]) -> Executable:
        self.captures += 1
        captured = capture(model, args, kwargs)

        def run(*tensors: Tensor) -> Any:
            self.runs += 1
            return captured.graph.forward(*tensors)

        return Executable(captured, run, Findings(signature="recorded"))


def optimize(model: nn.Module, config: Config = DEFAULT) -> tuple[Any, Recorder]:
    recorder = Recorder()
    return optimized(model, recorder, config), recorder


class Tower(nn.Module):
    """Two tables, a dense input, dropout and batch norm: every kind of state, and both modes matter."""

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

    def embed(self, ids: Tensor) -> Tensor:
        return self.tables[0](ids)


def tower_inputs(batch: int = 6, rows: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3), torch.randint(0, rows, (batch, 2))


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
