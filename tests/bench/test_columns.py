from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import bags, columns, machine, peers
from bench.models import ManyColumns, make_inputs
from bench.peers import Ready, Skipped, Subject
from bench.verify import Judge

ROOT = Path(__file__).resolve().parents[2]


def run(argv: list[str], capsys) -> tuple[int, str]:
    status = columns.main([*argv, "--columns", "5", "--seconds", "0", "--threads", str(torch.get_num_threads())])
    return status, capsys.readouterr().out


def test_columns_end_to_end(short_tables, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "with_fxopt", lambda module, args: Ready(module, 1.25))
    status, out = run(["--batches", "1,4", "--peers", "fxopt", "--json", str(tmp_path / "o.json")], capsys)
    assert status == 0 and "fxopt took 1.2 s to make" in out
    saved = json.loads((tmp_path / "o.json").read_text())
    assert [cell["labels"] for cell in saved["cells"]] == [[p, b] for p in ("whole", "columns") for b in ("1", "4")]
    assert all(set(cell["contenders"]) == {"eager", "fxopt"} for cell in saved["cells"])
    assert saved["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("packed", [False, True])
def test_checks_around_every_column_leave_no_operator(short_tables, packed):
    model = ManyColumns(peers.E.scaled(8), columns_only=True)
    twins = columns.guarded(Subject("e", 8, packed=packed), model)
    plain, guarded = (it.call._fxopt.findings[0] for it in twins.values())
    assert guarded.operators_before > 2 * plain.operators_before
    assert guarded.operators_after == plain.operators_after
    with torch.no_grad():
        for batch in (0, 1, 33):
            inputs = make_inputs(model.mix, batch, packed)
            torch.testing.assert_close(twins["fxopt guarded"].call(*inputs), model(*inputs))


def test_guarded_end_to_end(short_tables, capsys, monkeypatch):
    monkeypatch.setattr(peers, "with_fxopt", lambda module, args: Ready(module, 1.25))
    status, out = run(["--batches", "4", "--guarded"], capsys)
    assert status == 0 and "fxopt guarded took 1.2 s to make" in out


def test_columns_names_a_wrong_contender_and_fails(short_tables, capsys, monkeypatch):
    monkeypatch.setattr(peers, "with_fxopt", lambda module, args: Ready(lambda *x: module(*x) * 1.01, 0.0))
    status, out = run(["--batches", "4", "--peers", "fxopt"], capsys)
    assert status == 1 and "wrong" in out and "budget" in out


def test_compilers_are_left_out_of_a_thousand_columns():
    args = columns.parse(["--peers", "compile,aoti"])
    found = columns.contenders(args, Subject("e", 1000), torch.nn.Identity())
    assert isinstance(found["compile"], Skipped) and "takes minutes at 1000 columns" in found["compile"].reason
    assert isinstance(found["aoti"], Skipped)


def test_a_compiler_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(peers.sys, "executable", "/bin/sh")  # sh -c "from bench ..." fails at once
    failed = peers.with_aoti(Subject("e", 5), 1, limit=5)["aoti"]
    assert isinstance(failed, Skipped) and failed.reason
    monkeypatch.setattr(peers.subprocess, "run", lambda *a, timeout, **k: _never(a, timeout))
    hung = peers.with_aoti(Subject("e", 5), 1, limit=5)["aoti"]
    assert isinstance(hung, Skipped) and hung.reason == "not done after 5 s"


def _never(args: tuple, timeout: float) -> None:
    raise subprocess.TimeoutExpired(args[0], timeout)


def test_unknown_peer(capsys):
    with pytest.raises(SystemExit):
        columns.parse(["--peers", "fxopt,xla"])
    assert "found xla" in capsys.readouterr().err


def test_bags_inputs_and_peers():
    model = bags.OneBag(rows=500, dim=16, mode="mean")
    inputs = bags.make_inputs(9, rows=500)
    expected = Judge(model).expect(inputs)
    found = {"F.embedding_bag": bags.with_torch(model), **bags.with_fbgemm(model)}
    for name, it in found.items():
        if isinstance(it, Ready):
            expected.check(name, it.call(*inputs))
    lengths = torch.diff(bags.make_inputs(4096, rows=500)[1])
    assert lengths.min() == 0 and lengths.max() == 100 and 48 < lengths.double().mean() < 52


def test_results_are_named_after_date_and_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(machine, "cpu_name", lambda: "Some(R) CPU @ 2.60GHz")
    path = machine.save("columns", {"cells": []})
    assert path.name.startswith("columns_20") and path.name.endswith("_Some-R-CPU-2-60GHz.json")


def test_neighbours_share_is_a_share():
    neighbours = machine.Neighbours()
    sum(range(10**6))
    assert 0.0 <= neighbours.share() <= 1.5


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["nothing"], 2), (["--help"], 0)])
def test_usage(argv, status):
    done = subprocess.run([sys.executable, "-m", "bench", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert "columns" in done.stdout and "bags" in done.stdout and "zoo" in done.stdout
