"""Choices by the number of rows: each is a torch.cond of the program, at sizes on both sides of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tune.tuner import Tuner, Verdict
from tests.export.conftest import ROWS, Small, called, inputs

pytestmark = pytest.mark.timed


@pytest.fixture(autouse=True)
def verdict(monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """Every rewrite is faster for few rows, and slower for many."""
    found = Verdict({1: 4.0, 16: 2.0, 4096: 0.25})
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: found)
    return found


@torch.no_grad()
def test_choices_by_size_are_in_the_program() -> None:
    """One of them reads two buffers that share memory."""
    model = Small().eval()
    program = fxopt.export(model, inputs(5))
    assert "cond" in called(program)
    for batch in (1, 3, 200, 3000):
        call = inputs(batch)
        torch.testing.assert_close(program.module()(*call), model(*call))


class Recent(nn.Module):
    """A history of ids of a column's table: the choice reads how long it is. item [B, 2], seen [B, L]."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.users = nn.Embedding(ROWS, 8), nn.Embedding(ROWS, 8)
        self.top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, item: Tensor, seen: Tensor) -> Tensor:
        query, history = self.items(item[:, 0]), self.items(seen)
        weights = (query.unsqueeze(1) * history).sum(-1).masked_fill(seen <= 0, -1e9).softmax(1)
        pooled = (weights.unsqueeze(-1) * history).sum(1)
        return self.top(torch.cat([query, self.users(item[:, 1])], 1)) + pooled.mean(1, keepdim=True)


def histories(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, ROWS, (batch, 2)), torch.randint(0, ROWS, (batch, length))


SIZES = [(batch, length) for batch in (0, 1, 3, 3000) for length in (0, 1, 5)]


@torch.no_grad()
def test_a_choice_that_reads_a_size_is_in_a_saved_program(verdict: Verdict, tmp_path: Path) -> None:
    model, (most, _) = Recent().eval(), verdict.split()
    program = fxopt.export(model, histories(37, 5))
    assert "cond" in called(program)
    torch.export.save(program, tmp_path / "model.pt2")
    run = torch.export.load(tmp_path / "model.pt2").module()
    for batch, length in [*SIZES, (most, 7), (most + 1, 7)]:
        call = histories(batch, length)
        torch.testing.assert_close(run(*call), model(*call))


@pytest.mark.slow
@torch.no_grad()
def test_a_choice_that_reads_a_size_is_in_a_package(library: Path, tmp_path: Path) -> None:
    model = Recent().eval()
    program = fxopt.export(model, histories(37, 5))
    run = fxopt.load(fxopt.export.package(program, tmp_path / "package.pt2"), library.parent)
    for batch, length in SIZES:
        call = histories(batch, length)
        torch.testing.assert_close(run(*call), model(*call))
