"""Elements in another order, in tensors whose sizes agree; sizes that coincide at the capture and part later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize

CONFIG = Config(verify="off", tune="off")
SIZES = (8, 3, 1, 0, 5, 2)
LAST = torch.tril_indices(8, 8, -1)


class Model(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))
        self.gate = nn.Linear(8, 3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def towers(self, *inputs: Tensor, dim: int = 1) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts for x in inputs], dim)


def outcome(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except Exception as error:
        return type(error), str(error)


def check(run: Callable[..., Any], make: Callable[[int], Tensor], captured_at: int) -> None:
    model = Model(run).eval()
    with torch.no_grad():
        optimized = optimize(model, (make(captured_at),), CONFIG)
        for size in SIZES:
            x = make(size)
            wanted, found = outcome(model, x), outcome(optimized, x)
            if isinstance(wanted, Tensor):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            else:
                assert found == wanted, size
    assert any(entry.executable is not None for entry in optimized._fxopt.entries)  # type: ignore[union-attr]


# x [B, 8]
ROWS: dict[str, Callable[..., Any]] = {
    "towers of x.t()": lambda m, x: m.towers(x.transpose(0, 1).reshape(x.shape)),
    "towers of a flat x.t()": lambda m, x: m.towers(x.t().contiguous().flatten().view(-1, 8)),
    "towers of both": lambda m, x: m.towers(x, x.t().reshape(-1, 8)),
    "gates of x.t()": lambda m, x: (m.towers(x) * m.gate(x.t().reshape(x.shape)).softmax(1).unsqueeze(2)).sum(1),
    "gates moved": lambda m, x: (m.towers(x) * m.gate(x).softmax(1).t().reshape(-1, 3).unsqueeze(2)).sum(1),
    "towers side by side": lambda m, x: m.towers(x, dim=0).reshape(x.shape[0], 3, 4),
    "towers in three": lambda m, x: m.towers(x).reshape(3, -1, 4).sum(0),
    "towers permuted": lambda m, x: m.towers(x, dim=0).permute(1, 0, 2).reshape(-1, 12),
    "towers below each other": lambda m, x: torch.cat([expert(x) for expert in m.experts], 0).reshape(-1, 12),
    "layers": lambda m, x: m.second(m.first(x).relu().t().reshape(-1, 8)),
    "product": lambda m, x: x * torch.sigmoid(x.t().reshape(x.shape)),
    "cross": lambda m, x: x * m.first(x).t().reshape(x.shape) + x,
    "outer": lambda m, x: (x.unsqueeze(2) * x.unsqueeze(1)).transpose(1, 2).reshape(-1, 64),
    "each with each": lambda m, x: (x.unsqueeze(0) * x.unsqueeze(1)).sum(1).reshape(x.shape),
    "last row": lambda m, x: x * torch.sigmoid(x[x.shape[0] - 1 :]),
    "last two rows": lambda m, x: x[x.shape[0] - 2 :] * 2,
    "up to the last row": lambda m, x: x[: x.shape[0] - 1].relu().sum(0),
    "halves": lambda m, x: x[: x.shape[0] // 2] * 2 + x[x.shape[0] - x.shape[0] // 2 :],
    "last column": lambda m, x: x * torch.sigmoid(x[:, x.shape[1] - 1 :]),
    "inferred": lambda m, x: m.first(x.reshape(x.shape[0], -1)),
    "a layer and its transpose": lambda m, x: x @ m.first.weight + x @ m.first.weight.t(),
}
# x [B, 8, 8]
SQUARES: dict[str, Callable[..., Any]] = {
    "towers": lambda m, x: m.towers(x.transpose(0, 1).reshape(x.shape), dim=1).sum(2),
    "towers of dims": lambda m, x: m.towers(x.permute(0, 2, 1).reshape(x.shape).sum(1)),
    "layers": lambda m, x: m.second(m.first(x).transpose(1, 2).reshape(x.shape)),
    "product": lambda m, x: x * torch.sigmoid(x.transpose(1, 2)) + x.transpose(1, 2).reshape(x.shape),
    "softmax": lambda m, x: x.transpose(1, 2).reshape(x.shape).softmax(-1) * x,
    "sum": lambda m, x: (x * x.transpose(1, 2).reshape(x.shape)).sum(1),
    "dots of columns": lambda m, x: torch.bmm(x.transpose(1, 2), x)[:, LAST[0], LAST[1]],
    "dots of rows that moved": lambda m, x: torch.bmm(x.transpose(0, 1).reshape(x.shape), x)[:, LAST[0], LAST[1]],
    "factorization over dims": lambda m, x: (x.sum(2) ** 2 - (x**2).sum(2)).sum(1, keepdim=True),
    "factorization of both": lambda m, x: (x.sum(1) ** 2 - (x**2).sum(2)).sum(1, keepdim=True),
    "einsum": lambda m, x: torch.einsum("bij,bji->bi", x, x) + torch.einsum("bij,bkj->bki", x, x).sum(2),
    "convolution": lambda m, x: F.conv1d(x, m.first.weight.unsqueeze(2)).transpose(1, 2).reshape(x.shape),
    "norm": lambda m, x: F.layer_norm(x.transpose(1, 2).reshape(x.shape), (8,)),
    "fields and dims": lambda m, x: x * m.first(x.mean(2)).sigmoid().unsqueeze(1),
    "running sum": lambda m, x: x.cumsum(1) + x.transpose(1, 2).cumsum(1).reshape(x.shape),
}
# x [B, L, 8], where L = B
LENGTHS: dict[str, Callable[..., Any]] = {
    "layers": lambda m, x: m.second(m.first(x.transpose(0, 1).reshape(x.shape)).relu()),
    "last": lambda m, x: x * torch.sigmoid(x[:, x.shape[1] - 1 :]),
    "attention": lambda m, x: (x @ x.transpose(1, 2)).softmax(1) @ x,
    "scores": lambda m, x: (m.first(x) @ x.transpose(1, 2)).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1),
    "batch for length": lambda m, x: (x + x.transpose(0, 1)).sum(1),
}


@pytest.mark.parametrize("captured_at", [8, 1])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, captured_at: int) -> None:
    check(ROWS[name], lambda size: torch.randn(size, 8), captured_at)


@pytest.mark.parametrize("captured_at", [8, 1])
@pytest.mark.parametrize("name", SQUARES)
def test_squares(name: str, captured_at: int) -> None:
    check(SQUARES[name], lambda size: torch.randn(size, 8, 8), captured_at)


@pytest.mark.parametrize("length", [None, 8, 3])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str, length: int | None) -> None:
    """Captured where the length is the batch, called where it is or where it is another number."""
    check(LENGTHS[name], lambda size: torch.randn(size, size if length is None or size == 8 else length, 8), 8)
