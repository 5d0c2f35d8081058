"""What of the GPU benchmark needs no GPU."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from torch import nn

from bench import gpu
from bench.gpu_cases import Bags, Case, whole
from bench.gpu_dense import DCNv2
from bench.gpu_ids import HOTNESS, make_ids
from bench.gpu_peers import Peer, Unavailable, peers, with_fbgemm
from bench.gpu_rows import Row, remarks, table, write
from bench.gpu_timing import Gpu

MACHINE = Gpu("G", "2", "13", 1000.0, 2000.0, 1000.0, 100.0, 200.0, 5.0, 2.0)


def test_fbgemm_gets_the_same_tables_and_bags():
    pytest.importorskip("fbgemm_gpu")
    bags = Bags(3, 50, 8, torch.float32, "cpu")
    ids = [torch.randint(0, 50, (12,)) for _ in range(3)]
    offsets = [torch.tensor([0, 5, 5, 12]), torch.tensor([0, 1, 2, 12]), torch.tensor([0, 4, 8, 12])]
    with torch.no_grad():
        torch.testing.assert_close(with_fbgemm(bags, ids, offsets)(), bags(ids, offsets))


@pytest.mark.parametrize(("kind", "share"), [*HOTNESS.items(), ("uniform", 1 - 1 / math.e), ("one item", 1 / 50_000)])
def test_ids_are_as_hot_as_their_class(kind, share):
    rows = 50_000
    ids = make_ids(kind, rows, rows, torch.Generator().manual_seed(3))
    assert ids.shape == (rows,) and ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < rows
    assert len(ids.unique()) / rows == pytest.approx(share, rel=0.05)
    assert torch.equal(ids, make_ids(kind, rows, rows, torch.Generator().manual_seed(3)))


def test_hot_ids_lie_anywhere_in_the_table():
    ids = make_ids("zipf", 10_000, 1000, torch.Generator().manual_seed(0))
    counts = ids.bincount(minlength=1000).double()
    assert counts.max() == pytest.approx(10_000 / sum(1 / k for k in range(1, 1001)), rel=0.1)
    assert 0.3 < float(counts[:500].sum() / counts.sum()) < 0.7


def test_an_unknown_kind_of_ids():
    with pytest.raises(ValueError, match=r"expected one of uniform, .*, found 'cold'"):
        make_ids("cold", 1, 1, torch.Generator())


def test_bytes_and_operations_of_a_model():
    model = DCNv2()
    case = whole("DCN-v2", 4, model, (torch.randn(4, 13), torch.randint(0, 1000, (4, 26))), 64.0)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert case.flops == sum(2 * 4 * m.in_features * m.out_features for m in layers)
    weights = sum(4 * (m.in_features + 1) * m.out_features for m in layers)
    assert case.bytes_read == 4 * (13 * 4 + 26 * 8) + 64 + weights and case.bytes_written == 16


def test_the_floor_is_what_takes_longer():
    assert MACHINE.floor(2e12, 1e12) == pytest.approx(2.0)
    assert MACHINE.floor(2e12, 1e12, 500e12) == pytest.approx(5.0)
    assert MACHINE.floor(2e12, 1e12, 500e12, halves=True) == pytest.approx(2.5)


@pytest.fixture
def clock(monkeypatch):
    """Calls take 3 us, replays 2, cold ones 4."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "replayed", lambda call: Replay(call))
    monkeypatch.setattr(gpu, "seconds_of", lambda call: 2e-6 if isinstance(call, Replay) else 3e-6)
    monkeypatch.setattr(gpu, "seconds_cold", lambda call: 4e-6)


class Replay:
    def __init__(self, call):
        self.call = call

    def __call__(self):
        return self.call()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x, x


def case(name="doubled", seconds=(1.0, 1.0)):
    return Case(name, 3, Doubled(), (torch.randn(3),), 2e6, 1e6, compile_seconds=seconds)


def eager(case):
    return lambda: case.module(*case.inputs)


def wrong(case):
    return lambda: (2.1 * case.inputs[0], case.inputs[0])


def absent(case):
    raise Unavailable("not installed")


def broken(case):
    raise RuntimeError("no graph\nfor you")


def slow(case):
    return case.compile_seconds[0]


PEERS = (
    Peer("eager", eager),
    Peer("graphs", eager, replays=True),
    Peer("wrong", wrong),
    Peer("absent", absent),
    Peer("broken", broken),
    Peer("elsewhere", eager, runs=lambda case: False),
    Peer("slow", eager, seconds=slow),
)


def rows_of(*cases, left=10.0):
    rows: list[Row] = []
    seen = [str(row) for row, _ in gpu.measure(iter(cases), PEERS, MACHINE, time.perf_counter() + left, rows)]
    return rows, seen


def test_a_row_has_everybody_or_says_why_not(clock, tmp_path):
    (row, other), seen = rows_of(case(), case("other", (math.inf, math.inf)))
    assert seen == ["doubled, batch 3", "other, batch 3", "doubled, batch 3"]  # the slow one of the first comes last
    assert row.floor_us == pytest.approx(2.0) and list(row.measured) == ["eager", "graphs", "slow"]
    assert (row.measured["eager"].us, row.measured["eager"].graph_us) == pytest.approx((3.0, 2.0))
    assert row.measured["eager"].cold_us == pytest.approx(4.0) and row.measured["eager"].error == 0
    assert row.measured["graphs"].graph_us is None and row.measured["graphs"].best_us == pytest.approx(3.0)
    assert row.left_out["wrong"].startswith("differs from eager by 5.0e-02")
    assert row.left_out["absent"] == "not installed" and row.left_out["broken"] == "RuntimeError: no graph"
    assert other.left_out["slow"] == "not asked, it takes minutes"

    lines = list(remarks([row, other]))
    assert "no absent: not installed (doubled, batch 3; other, batch 3)" in lines
    assert "no slow: not asked, it takes minutes (other, batch 3)" in lines

    write(tmp_path / "new" / "gpu.json", MACHINE, [row, other])
    read = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert read["gpu"]["bf16_tflops"] == 200.0 and read["rows"][0]["measured"]["graphs"]["cold_us"] is None


def test_what_is_made_quickly_comes_first(clock):
    _, seen = rows_of(case("long", (9.0, 9.0)), case("short"))
    assert seen == ["long, batch 3", "short, batch 3", "short, batch 3", "long, batch 3"]


def test_what_no_time_is_left_for(clock):
    (row,), _ = rows_of(case(), left=0.5)
    assert list(row.measured) == ["eager", "graphs"] and row.left_out["slow"] == "no time was left"
    (row,), _ = rows_of(case(), left=-0.5)
    assert not row.measured and row.left_out["eager"] == "no time was left"


def test_the_table(clock):
    rows, _ = rows_of(case())
    assert [list(column.cells)[1] for column in table(rows).columns] == [
        "doubled", "3", "graphs", "3.0", "", "", "2.0", "67%", "1.00", "0.67", "0e+00",
    ]  # fmt: skip


def test_everybody_who_is_asked():
    assert [peer.name for peer in peers() if peer.runs(case())] == [
        "eager", "fxopt", "fxopt cuda_graphs", "compile", "compile max-autotune",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == "python -m bench gpu: no CUDA device here\n"
