from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench import zoo
from bench.peers import Ready
from tests.bench.timed import cell


class Entry:
    """A zoo entry of one small model."""

    name = "own/linear"

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).eval()

    def make_inputs(self, batch: int, seed: int, model: nn.Module) -> tuple[Tensor]:
        return (torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed * 1000 + batch)),)

    def fresh(self, args: tuple) -> tuple:
        return args


def same(model: nn.Module, args: tuple) -> Ready:
    return Ready(model, 0.5)


def test_a_right_model():
    result = zoo.run_model(Entry(), (1, 8), 0.01, same)
    assert not result.wrong and not result.left_out
    assert result.before == result.after == 3
    assert 0.3 < result.ratio(1) < 3 and result.ratio(256) is None


def test_wrong_only_at_a_batch_that_was_not_captured():
    def bad(model: nn.Module, args: tuple) -> Ready:
        return Ready(lambda x: model(x) if len(x) == len(args[0]) else model(x) + 1, 0.5)

    result = zoo.run_model(Entry(), (1,), 0.01, bad)
    assert "batch 1" in result.wrong and not result.cells


def test_an_optimize_that_raises_is_a_failure():
    def bad(model: nn.Module, args: tuple) -> Ready:
        raise ValueError("no such\nthing")

    assert zoo.run_model(Entry(), (1,), 0.01, bad).wrong == "ValueError: no such"


def test_a_model_that_eager_cannot_run_is_left_out():
    class Broken(Entry):
        def make_model(self) -> nn.Module:
            raise ImportError("no library")

    result = zoo.run_model(Broken(), (1,), 0.01, same)
    assert result.left_out == "ImportError: no library" and not result.wrong


def test_a_batch_that_eager_refuses_is_left_out():
    class Picky(Entry):
        def make_model(self) -> nn.Module:
            return nn.Sequential(super().make_model(), nn.BatchNorm1d(1)).train()

    result = zoo.run_model(Picky(), (1, 8), 0.01, same)  # BatchNorm in training takes no batch of 1
    assert not result.wrong and result.ratio(1) is None and result.ratio(8)


def result(name: str, ratio: float) -> zoo.Result:
    return zoo.Result(name, (cell(name, 1, eager=ratio, fxopt=1.0),))


def test_slow_models_are_named_and_means_are_geometric():
    results = [result("fast", 4.0), result("even", 0.96), result("slow", 0.5)]
    notes = [note for result in results for note in zoo.notes(result, (1,))]
    assert notes == ["[red]slow: slower than eager at batch 1: 0.50[/]"]
    assert zoo.geometric_mean([4.0, 0.25, 1.0]) == pytest.approx(1.0)


def test_no_zoo(tmp_path, capsys):
    assert zoo.main(["--zoo", str(tmp_path / "zoo.py")]) == 2
    assert "no zoo at" in capsys.readouterr().out
