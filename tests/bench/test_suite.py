from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from rich.table import Table

from bench import growth, machine, quick, rows, suite
from bench.all import PRESET as ALL
from bench.cells import markdown, shown_ratio, table
from bench.compilers import packaged
from bench.dense_models import Entry, TrainingStep, mlp
from bench.large_models import TorchRecDLRM
from bench.peers import Skipped
from bench.verify import Judge
from tests.bench.timed import cell, timings

SMALL = Entry("small", lambda: mlp(4, 8, 1), lambda B, g: (torch.randn(B, 4, generator=g),))
TINY = replace(quick.PRESET, seconds=0.01, columns=(10, 12))
NEW = ("MLPerf DLRM-v2", "TorchRec DLRM", "DeepFM", "1000 mixed columns")


@pytest.fixture
def small(monkeypatch):
    def failing():
        raise ValueError("it does not work")

    def absent():
        raise ImportError("no such library")

    found = [rows.Row(SMALL, quick=(2,), step=3), rows.Row(replace(SMALL, name="absent", make=absent), quick=(1,))]
    broken = rows.Row(replace(SMALL, name="small, broken", make=failing), quick=(1,))
    monkeypatch.setattr(suite, "rows", lambda: found)
    return found, broken


def test_a_preset_from_rows_to_files(small, tmp_path, capsys):
    target = tmp_path / "o.json"
    assert suite.main(TINY, ["--limit", "0", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "absent left out: no such library" in out and "other processes used" in out
    saved = json.loads(target.read_text())
    labels = [c["labels"] for c in saved["cells"]]
    assert labels == [["small", "2"], ["small, training step", "3"], ["10", "1"], ["12", "1"]]
    assert set(saved["optimize_s"]) == {"10", "12"}
    fast = saved["cells"][0]["contenders"]["fxopt"]
    assert fast["min_s"] <= fast["median_s"] <= fast["p99_s"] and len(fast["quartiles"]) == 2
    text = target.with_suffix(".md").read_text()
    assert "## quick" in text and "| small, training step | 3 |" in text and "## growth" in text


def test_the_plots(small, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[bench]')")
    assert suite.main(TINY, ["--limit", "0", "--plot", str(tmp_path / "plot")]) == 0
    names = {path.name for path in tmp_path.iterdir() if path.stat().st_size}
    assert names == {"plot.png", "plot.svg", "plot_growth.png", "plot_growth.svg"}


def test_saved_without_matplotlib(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert suite.main(TINY, ["--limit", "0", "--only", "small", "--save"]) == 0
    assert "no plots: " in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}


def test_some_rows_alone(small, capsys):
    assert suite.main(TINY, ["--limit", "0", "--only", "small"]) == 0
    assert "growth" not in capsys.readouterr().out


def test_a_row_that_fails_is_named_and_the_rest_is_measured(small, capsys):
    small[0].insert(0, small[1])
    assert suite.main(TINY, ["--limit", "0", "--only", "small"]) == 1
    out = capsys.readouterr().out
    assert "small, broken: ValueError: it does not work" in out and "small, training step" in out


def test_no_time_is_left(small, capsys):
    assert suite.main(TINY, ["--minutes", "0"]) == 0
    assert "no time was left for small, absent" in capsys.readouterr().out


def test_a_compiler_gets_its_share_of_the_time(monkeypatch):
    monkeypatch.setattr(suite.time, "perf_counter", lambda: 0.0)
    args = suite.parse(quick.PRESET, [])
    row = rows.Row(SMALL, quick=(1, 256), step=3)
    without = replace(row, compiles=False)
    left = [row, without, row, without]

    def limit(row: rows.Row, minutes: float) -> float:
        return suite.Suite(quick.PRESET, args, None, 60 * minutes)._limit(row, left)

    own = suite.OWN_SECONDS * 4
    assert limit(row, 2) == pytest.approx((120 - own) / 2 / 3) and limit(row, 100) == 120.0
    assert limit(row, 0.5) == 0.0 and limit(without, 100) == 0.0
    whole = suite.Suite(replace(quick.PRESET, zoo=True), args, None, 120)
    assert whole._limit(row, left) == pytest.approx(
        (120 - own) / 2 / (len(row.batches(False)) + 4)
    )  # two packages, max-autotune


@pytest.mark.parametrize("name", NEW)
def test_the_models_run_and_repeat(name, monkeypatch):
    monkeypatch.setattr("bench.large_models.MOST_ROWS", 50)
    entry = next(row.entry for row in rows.rows() if row.entry.name == name)
    if name.startswith("TorchRec"):
        pytest.importorskip("torchrec")
    model = entry.make_model()
    args = entry.make_inputs(3, 0, model)
    Judge(model, entry.fresh).expect(args).check("the same model", entry.make_model()(*entry.fresh(args)))


def test_a_model_whose_inputs_no_compiler_describes_is_left_out_by_it(monkeypatch):
    pytest.importorskip("torchrec")
    monkeypatch.setattr("bench.large_models.MOST_ROWS", 50)
    model = TorchRecDLRM.model()
    found = packaged(model, TorchRecDLRM.inputs(3, torch.Generator()), 5.0)
    assert all(isinstance(package, Skipped) and package.reason for package in found.values())


@pytest.mark.parametrize("row", [row for row in rows.rows() if row.step], ids=lambda row: row.entry.name)
def test_the_models_that_train_have_a_loss(row, monkeypatch):
    monkeypatch.setattr("bench.large_models.MOST_ROWS", 50)
    model = row.entry.make_model()
    loss, *gradients = TrainingStep(model)(*row.entry.make_inputs(3, 0, model))
    assert loss.dim() == 0 and len(gradients) == len(list(model.parameters()))


def test_the_presets_have_what_they_say():
    every = rows.rows()
    assert len({row.entry.name for row in every}) == len(every)
    assert 5 <= sum(bool(row.batches(quick=True)) for row in every) < len(every)
    assert all(set(row.cold) <= set(row.quick) for row in every)
    assert quick.PRESET.quick and not ALL.quick and ALL.columns == growth.SIZES


def test_what_is_noisy_has_a_question_mark():
    calm = cell("calm", 1, eager=2.0, fxopt=1.0)
    wild = replace(calm, timings=timings(eager=(1.0, 2.0, 4.0, 8.0), fxopt=(1.0,) * 4))
    assert shown_ratio(calm, "fxopt") == "2.00" and shown_ratio(wild, "fxopt") == "3.00?"
    assert shown_ratio(calm, "torch.compile") == ""


def test_a_table_as_markdown():
    shown = Table(title="t", caption="c")
    shown.add_column("a")
    shown.add_row("[bold]1[/]")
    assert markdown(shown) == "## t\n\n| a |\n| --- |\n| 1 |\n\nc\n"
    assert "| small |" in markdown(table("t", ("model", "batch"), [cell("small", 1, eager=1.0)]))
