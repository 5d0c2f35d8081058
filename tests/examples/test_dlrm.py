from __future__ import annotations

import copy
import gzip
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import checkpoint
import demo
import fxopt
import model as dlrm
from criteo import read_batches
from evaluate import predict
from generate import generate
from metrics import auc
from timing import interleaved_medians
from train import train

DIRECTORY = Path(dlrm.__file__).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("data") / "rows.tsv", rows=12_000)


def test_forward_is_the_papers(data: Path) -> None:
    model = dlrm.build_model()
    batch = next(read_batches(data, 5, dlrm.TABLE_ROWS))
    dense = model.bottom(batch.dense)
    vectors = [dense] + [table.weight[batch.sparse[:, f]] for f, table in enumerate(model.tables)]  # type: ignore[index]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(27) for j in range(i)]
    expected = model.top(torch.cat([dense, torch.stack(pairs, dim=1)], dim=1))[:, 0]
    torch.testing.assert_close(model(batch.dense, batch.sparse), expected)


@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_the_convention_of_the_report(batch_size: int) -> None:
    model = dlrm.build_model()
    assert not model.training
    assert model(*dlrm.example_inputs(batch_size)).shape == (batch_size,)
    other = dlrm.build_model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_generated_rows_repeat_by_seed_and_compress(tmp_path: Path) -> None:
    first, again = generate(tmp_path / "a", 300), generate(tmp_path / "b", 300)
    other, zipped = generate(tmp_path / "c", 300, seed=1), generate(tmp_path / "d.gz", 300)
    assert first.read_bytes() == again.read_bytes() == gzip.decompress(zipped.read_bytes())
    assert first.read_bytes() != other.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_generated_rows_are_skewed_and_incomplete(data: Path) -> None:
    (batch,) = read_batches(data, 12_000, dlrm.TABLE_ROWS)
    assert 0.1 < batch.labels.mean() < 0.4
    assert 0.05 < (batch.sparse == 0).float().mean() < 0.15
    for ids in batch.sparse.unbind(1):
        _, counts = ids[ids > 0].unique(return_counts=True)
        assert counts.max() > 2.5 * counts.float().mean()


def test_the_planted_signal_is_learned_and_survives_the_checkpoint(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = dlrm.DLRM()
    labels, before = predict(model, data, dlrm.TABLE_ROWS)
    assert train(model, data, batch_size=256) == 10_800
    _, after = predict(model, data, dlrm.TABLE_ROWS)
    assert auc(labels, before) < 0.57
    assert auc(labels, after) > 0.6

    checkpoint.save(tmp_path / "runs" / "dlrm.pt", model, dlrm.TABLE_ROWS)
    loaded, table_rows = checkpoint.load(tmp_path / "runs" / "dlrm.pt")
    assert table_rows == dlrm.TABLE_ROWS
    assert torch.equal(predict(loaded, data, table_rows)[1], after)


def test_the_optimized_model_trains_alike_and_shares_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Adagrad's first steps are signs of gradients: one rounding of the weights moves logits of about 1 by 0.3.
    monkeypatch.setattr(torch.optim, "Adagrad", partial(torch.optim.SGD, momentum=0.9))
    eager = dlrm.DLRM()
    reference = copy.deepcopy(eager)
    optimized = fxopt.optimize(eager)
    for model in (reference, optimized):
        train(model, data, batch_size=256, learning_rate=0.1)
    labels, expected = predict(reference, data, dlrm.TABLE_ROWS)
    _, found = predict(optimized, data, dlrm.TABLE_ROWS)
    _, before = predict(dlrm.DLRM(), data, dlrm.TABLE_ROWS)
    assert (expected - before).abs().max() > 0.5  # there was something to learn
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4)
    assert auc(labels, found) == pytest.approx(auc(labels, expected), abs=1e-3)

    checkpoint.save(tmp_path / "dlrm.pt", optimized, dlrm.TABLE_ROWS)
    loaded, _ = checkpoint.load(tmp_path / "dlrm.pt")
    torch.testing.assert_close(predict(loaded, data, dlrm.TABLE_ROWS)[1], found, rtol=0.0, atol=1e-5)


def test_training_stops_at_its_time(data: Path) -> None:
    assert train(dlrm.DLRM(), data, batch_size=64, seconds=0.0) == 64


def test_interleaved_medians_takes_turns() -> None:
    turns: list[str] = []
    medians = interleaved_medians({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, seconds=0.0)
    assert turns == ["a", "b"] * 7
    assert medians.keys() == {"a", "b"}


@pytest.mark.timed
def test_the_demo_shows_accuracy_times_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(tmp_path, rows=3000)
    shown = capsys.readouterr().out
    assert "AUC" in shown
    assert "Milliseconds per batch" in shown
    assert "fxopt report" in shown


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "generate.py"])
def test_scripts_explain_themselves(script: str) -> None:
    done = subprocess.run([sys.executable, DIRECTORY / script, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_scripts_name_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text("1\t2\n")
    command = [sys.executable, DIRECTORY / "train.py", path, "--checkpoint", tmp_path / "x.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "bad.tsv:1: expected 40 fields" in done.stderr
    assert "Traceback" not in done.stderr
