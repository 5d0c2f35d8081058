"""`fxopt.report` on optimized models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.optimize import optimize
from fxopt.report import Report, report, turns
from fxopt.report.data import Tally


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1))


class ReadsData(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if int(ids.sum()) > -1 else super().forward(ids + 1)


class Odd(torch.Tensor):
    """A subclass, which no capture takes."""


def ids(batch: int) -> tuple[Tensor]:
    return (torch.randint(0, 10, (batch, 3)),)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.02)
    monkeypatch.setattr(turns.Turns, "distrust", "")  # the machine may be busy with other tests


def test_expects_an_optimized_model() -> None:
    with pytest.raises(TypeError, match=r"expected a model returned by fxopt\.optimize, found Model"):
        report(Model())


def test_is_a_function_whatever_was_imported_first() -> None:
    assert isinstance(fxopt.report(optimize(Model())), Report)
    assert isinstance(fxopt.report(optimize(Model())), Report)


def test_before_the_first_call_and_after_it() -> None:
    model = optimize(Model().eval())
    assert report(model).signatures == ()
    with torch.no_grad():
        model(*ids(4))
    (found,) = report(model).signatures
    assert Tally("table lookups", 3, 1) in found.roles
    assert sum(tally.before for tally in found.roles) == found.operators_before
    assert found.measurements == ()
    assert "x at batch" not in str(report(model))


def test_measures_each_batch() -> None:
    steps: list[str] = []
    found = report(optimize(Model().eval()), {1: ids(1), 5: ids(5)}, progress=steps.append)
    assert steps == ["measure batch 1", "measure batch 5", "read the graphs"]
    (signature,) = found.signatures
    for expected, measured in zip((1, 5), signature.measurements, strict=True):
        assert measured.batch == expected and measured.problem == ""
        assert measured.speedup and measured.eager and measured.optimized
        assert measured.max_error is not None and measured.max_error < 1e-5
        assert sum(spent.before for spent in measured.spending) == pytest.approx(measured.eager)


def test_what_stays_eager_is_compared_too() -> None:
    (found,) = report(optimize(ReadsData().eval()), {2: ids(2)}).signatures
    assert found.eager_reason
    assert found.measurements[0].problem == "stays eager"
    assert found.measurements[0].speedup


def test_inputs_that_no_capture_serves() -> None:
    model = optimize(Model().eval())
    found = report(model, {2: (torch.randint(0, 10, (2, 3)).as_subclass(Odd),)})
    (signature,) = found.signatures
    assert "expected a plain strided tensor, found Odd" in signature.eager_reason
    assert signature.measurements[0].speedup


def test_a_wrong_answer_is_said_and_not_timed() -> None:
    model = optimize(Model().eval())
    with torch.no_grad():
        model(*ids(4))
    (entry,) = model._fxopt.entries
    right = entry.executable.run
    entry.executable.run = lambda *tensors: [out + 1 for out in right(*tensors)]
    (found,) = report(model, {4: ids(4)}).signatures
    assert found.measurements[0].problem.startswith("differs from eager")
    assert found.measurements[0].speedup is None
    assert found.measurements[0].max_error == pytest.approx(1)


def test_measuring_leaves_no_trace() -> None:
    model = Model()  # in train mode: batch norm counts
    model.norm.running_mean.fill_(0.5)
    args, before = ids(4), torch.random.get_rng_state()
    report(optimize(model), {4: args})
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.norm.num_batches_tracked == 0
    assert (model.norm.running_mean == 0.5).all()


def test_errors_of_the_model_pass() -> None:
    with pytest.raises(IndexError):
        report(optimize(Model().eval()), {1: (torch.full((1, 3), 99),)})
