"""What a report advises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxopt.optimize import optimize
from fxopt.report import report, turns
from fxopt.report.data import Advice


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.02)
    monkeypatch.setattr(turns.Turns, "distrust", "")


def advice(model: nn.Module, *args: Tensor) -> tuple[Advice, ...]:
    (found,) = report(optimize(model.eval()), {len(args[0]): args}).signatures
    return found.advice


class Checked(nn.Module):
    """Asks of its ids what nothing proves, and does little else."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.where((ids > 3) & (ids < 1000), ids.clamp(5, 900), ids).float()


def test_checks_that_are_left_are_named_with_their_line() -> None:
    found = advice(Checked(), torch.randint(0, 10**6, (2000, 50)))
    assert found
    assert "pass ids that are in range already" in found[0].text and found[0].batch == 2000
    assert found[0].place.line.startswith("test_advice.py:")
    assert all(each.gain and each.gain > 0 for each in found)
    assert [each.gain for each in found] == sorted((each.gain or 0.0 for each in found), reverse=True)


class Opaque(nn.Module):
    """One submodule cannot be captured."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort().values.cumsum(1) if float(x.sum()) > -1e9 else x

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = self.Inner(), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.inner(x))


def test_a_submodule_that_stops_the_capture_is_named() -> None:
    found = advice(Opaque(), torch.rand(500, 64))
    (opaque,) = [each for each in found if "could not be captured" in each.text]
    assert opaque.place.module == "inner" and opaque.gain


def test_nothing_to_do_is_no_advice() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)

    assert advice(Small(), torch.randint(0, 10, (4, 3))) == ()
