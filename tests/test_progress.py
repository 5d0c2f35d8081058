"""What an optimization says while it works: steps, warnings, logs, and graphs in files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import progress
from fxopt.config import Config
from fxopt.drawing import svg


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)


class Eager(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if int(ids.sum()) > -1 else super().forward(ids + 1)


def ids(batch: int = 4) -> tuple[Tensor]:
    return (torch.randint(0, 10, (batch, 3)),)


@torch.no_grad()
def optimized(model: nn.Module, **options: object) -> nn.Module:
    return fxopt.optimize(model.eval(), ids(), Config(**options))  # type: ignore[arg-type]


def test_whoever_listens_hears_each_step() -> None:
    steps: list[str] = []
    with progress.told(steps.append):
        optimized(Model())
    assert steps[0] == "capture" and "rewrite: embedding_columns" in steps and "compare with eager" in steps
    before = len(steps)
    progress.step("nobody listens")
    assert len(steps) == before


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_long_is_shown(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    for wanted, shown in ((None, False), (False, False), (True, True)):
        with progress.on_terminal(wanted):
            progress.step("compile fxopt_mlp")
            time.sleep(0.3)
        said = capsys.readouterr().err
        assert ("fxopt: compile fxopt_mlp, 0 s" in said) == shown, wanted
    assert terminal or said.count("\n") > 1, "again and again"


def test_another_thread_is_heard() -> None:
    steps: list[str] = []
    with progress.told(steps.append), ThreadPoolExecutor(1) as pool:
        pool.submit(progress.step, "unheard").result()
        pool.submit(progress.heard(progress.step), "heard").result()
    assert steps == ["heard"]


def test_a_short_one_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.on_terminal(True):
        progress.step("capture")
    assert capsys.readouterr() == ("", "")


def test_a_model_that_stays_eager_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxopt"):
        model = optimized(Eager())
        for batch in (4, 5, 6):
            model(*ids(batch))
            model(
                *ids(batch),
            )
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("fxopt")]
    assert warning.startswith("Eager stays eager for some inputs: ") and "item" in warning


def test_what_is_optimized_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    optimized(Model())
    assert not [record for record in caplog.records if record.name.startswith("fxopt")]


def test_torch_logs_knows_the_name(tmp_path: Path) -> None:
    script = (
        "import torch, fxopt\nmodel = torch.nn.Linear(3, 2).eval()\n"
        "with torch.no_grad(): fxopt.optimize(model, (torch.rand(4, 3),))"
    )
    environment = os.environ | {"TORCH_LOGS": "+fxopt", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "Linear: 1 -> 1 operators in " in found.stderr and "near misses" in found.stderr


def test_dump_writes_each_graph_that_changed(tmp_path: Path) -> None:
    model = optimized(Model(), dump=str(tmp_path / "graphs"))
    (first,) = (tmp_path / "graphs").iterdir()
    names = sorted(path.name for path in first.iterdir())
    assert names[:4] == ["00_captured.svg", "00_captured.txt", "01_normalize.svg", "01_normalize.txt"]
    (columns,) = [path for path in first.iterdir() if path.name.endswith("embedding_columns.txt")]
    assert "fxopt.columns" in columns.read_text() and "fxopt.columns" not in (first / "00_captured.txt").read_text()
    assert "float32[" in columns.read_text() and "test_progress.py:" in columns.read_text()
    picture = ElementTree.parse(columns.with_suffix(".svg")).getroot()
    boxes = [group.findtext("{*}title") or "" for group in picture.findall("{*}g")]
    assert len(boxes) > 2 and len(picture.findall("{*}path")) >= len(boxes) - 1
    assert any("fxopt.columns" in box and "test_progress.py:" in box for box in boxes)
    with torch.no_grad():
        model(torch.randint(0, 10, (4, 3), dtype=torch.int32))  # another signature
    assert len(list((tmp_path / "graphs").iterdir())) == 2


def test_a_folder_that_cannot_be_written_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    model = optimized(Model(), dump=str(tmp_path / "file"))
    (found,) = fxopt.report(model).signatures
    assert found.eager_reason == "" and found.operators_after == 1
    assert [record.getMessage() for record in caplog.records if "Config.dump: cannot write" in record.getMessage()]


def test_names_in_a_picture_are_escaped() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder('x"<&')
    graph.output(graph.call_function(torch.relu, (x,)))
    picture = ElementTree.fromstring(svg(graph))
    assert [box.findtext("{*}text") for box in picture.findall("{*}g")] == [node.name for node in graph.nodes]
    assert len(picture.findall("{*}path")) == 2
