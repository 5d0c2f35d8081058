"""Where the time of a call goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.dense_models import entries
from fxopt.optimize import optimize
from fxopt.report import report, turns
from fxopt.report.census import LOOKUP
from fxopt.report.kinds import COLUMNS, INDEX, INTERACTION, MLP
from fxopt.report.spending import BACKWARD, BETWEEN, spending

F, D, R = 8, 16, 100


class Model(nn.Module):
    """Hashed columns, their products, and an MLP that takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(R, D) for _ in range(F))
        self.top = nn.Sequential(nn.Linear(F * F, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([table(ids[:, i] % R) for i, table in enumerate(self.tables)], dim=1)
        return self.top(torch.bmm(rows, rows.transpose(1, 2)).flatten(1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.02)
    monkeypatch.setattr(turns.Turns, "distrust", "")


@pytest.mark.parametrize(
    ("own", "whole", "expected"),
    [
        ({MLP: 0.6, COLUMNS: 0.2}, 1.0, {COLUMNS: 0.2, MLP: 0.6, BETWEEN: 0.2}),
        ({MLP: 3.0, COLUMNS: 1.0}, 2.0, {COLUMNS: 0.5, MLP: 1.5}),  # the clock's own cost goes
        ({}, 1.0, {BETWEEN: 1.0}),
    ],
)
def test_adds_up_to_the_whole_call(own: dict[str, float], whole: float, expected: dict[str, float]) -> None:
    found = spending(own, whole, own, 2 * whole)
    assert {spent.kind: spent.before for spent in found if spent.before} == pytest.approx(expected)
    assert sum(spent.share for spent in found) == pytest.approx(1)
    assert sum(spent.after or 0.0 for spent in found) == pytest.approx(2 * whole)


def test_a_graph_that_does_not_run_operator_by_operator() -> None:
    assert all(spent.after is None for spent in spending({MLP: 0.5}, 1.0, None, 0.5))


@pytest.mark.parametrize(("training", "batch"), [(False, 2048), (True, 32)])
def test_fused_operators_are_what_they_replaced(training: bool, batch: int) -> None:
    model = Model().train(training)
    (found,) = report(optimize(model), {batch: (torch.randint(0, 1000, (batch, F)),)}, training=training).signatures
    assert found.operators_after < 8  # the lookups, the products and the layers are a call each, or nearly
    spent = {each.kind: each for each in found.measurements[0].spending}
    for kind in (COLUMNS, INTERACTION, MLP):
        assert spent[kind].after and spent[kind].before, kind
    assert not spent[INDEX].after  # it is part of the lookups now
    (measured,) = found.measurements
    assert sum(each.after or 0.0 for each in measured.spending) == pytest.approx(measured.optimized)
    assert sum(each.before for each in measured.spending) == pytest.approx(measured.eager)
    assert (BACKWARD in spent) == training
    mlp, columns = spent[MLP].after or 0.0, spent[COLUMNS].after or 0.0
    assert training or mlp > columns  # 180 million operations against 1 MB of rows


def test_rows_in_chunks_are_taken_apart() -> None:
    """Large batches run as one function, which gets sizes besides tensors; its inner operators have its time."""
    (entry,) = [each for each in entries() if each.name == "DIN"]
    model = entry.make_model()
    (found,) = report(optimize(model), {600: entry.make_inputs(600, 1, model)}).signatures
    assert any(ran.name == "row_chunks" and ran.changes for ran in found.passes)
    (measured,) = found.measurements
    assert sum(each.after or 0.0 for each in measured.spending) == pytest.approx(measured.optimized)
    assert len([each for each in measured.spending if each.after]) >= 3
    assert {block.kind for block in found.after} >= {COLUMNS, MLP}
    assert next(tally for tally in found.roles if tally.role == LOOKUP).after > 0
