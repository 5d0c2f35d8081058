"""When calls are captured and replayed: through stand-ins for what needs a GPU, so that this runs everywhere."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fxopt.capture.inputs import TensorSpec
from fxopt.findings import Findings
from fxopt.kernels.stage import op as stage
from fxopt.patterns.row_wise import NotRowWise, Rows
from fxopt.runtime import cuda_graphs
from fxopt.runtime.cuda_graphs import MOST_GRAPHS, Replays


def function(weight: Tensor, x: Tensor, offsets: Tensor, ids: Tensor) -> list[Tensor]:
    """Outputs of B rows, of 2 B, and of as many as the weight has."""
    return [x @ weight, x.repeat_interleave(2, 0), weight * 2]


def call(batch: int, ids: int) -> list[Tensor]:
    zeros = [torch.zeros(n, dtype=torch.int64) for n in (batch, ids)]
    return [torch.randn(batch, 4), *zeros]


class Stage:
    """Static memory that `inputs` are copied to by torch."""

    given: list[Tensor]  # what the call in progress was called with

    def __init__(self, rooms, device) -> None:
        self.tensors = [torch.zeros(room.shape, dtype=room.dtype) for room in rooms]

    def fill(self, inputs, stream) -> None:
        for static, x in zip(self.tensors, self.given, strict=True):
            static.zero_()[: len(x)] = x


class Graph:
    def __init__(self, run, outputs) -> None:
        self.run, self.outputs = run, outputs

    def replay(self) -> None:
        for static, new in zip(self.outputs, self.run(), strict=True):
            static.copy_(new)


class Log:
    """What each call did: "plain" eager, "capture", "replay"."""

    def __init__(self, monkeypatch, rows: Rows | None) -> None:
        self.did: list[str] = []
        self.broken: Exception | None = None
        self.wrong = 0.0
        self.findings = Findings("")
        specs = [("s0", 4), ("s0",), ("s1",)]
        dtypes = [torch.float32, torch.int64, torch.int64]
        inputs = tuple(TensorSpec("x", t, torch.device("cpu"), dims) for t, dims in zip(dtypes, specs, strict=True))
        capture = SimpleNamespace(state=[0], inputs=inputs)
        monkeypatch.setattr(stage, "kernel", lambda device: None)
        monkeypatch.setattr(stage, "Stage", Stage)
        for name, value in {
            "suited": lambda *_: torch.device("cuda", 0),
            "clamps": lambda module: False,
            "ready": lambda module, rows: (function, []),
            "row_wise": lambda *_: self.rows(rows),
        }.items():
            monkeypatch.setattr(cuda_graphs, name, value)
        monkeypatch.setattr(cuda_graphs.columns_errors, "raise_reported", lambda index: None)
        monkeypatch.setattr(Replays, "_record", lambda _, tensors: self.record(tensors))
        for name, result in {
            "is_current_stream_capturing": False, "synchronize": None, "graph_pool_handle": 0, "current_stream": 0,
            "device": contextlib.nullcontext(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
        executable = SimpleNamespace(
            run=self.plain, capture=capture, findings=self.findings, graph=SimpleNamespace(graph=None)
        )
        self.replays = Replays(executable)  # type: ignore[arg-type]

    def rows(self, rows: Rows | None) -> Rows:
        if rows is None:
            raise NotRowWise(torch.fx.Graph().placeholder("x"), "rows are mixed")
        return rows

    def plain(self, *tensors: Tensor) -> list[Tensor]:
        self.did.append("plain")
        return function(*tensors)

    def record(self, tensors):
        self.did.append("capture")
        if self.broken:
            raise self.broken
        outputs = function(*tensors)

        def run():
            self.did.append("replay")
            return [x + self.wrong for x in function(*tensors)]

        return Graph(run, outputs), outputs

    def of(self, batch: int, ids: int = 9) -> list[str]:
        """What a call does, whose answer is eager's."""
        self.did, weight = [], torch.randn(4, 3) if not hasattr(self, "weight") else self.weight
        self.weight, Stage.given = weight, call(batch, ids)
        found = self.replays(weight, *Stage.given)
        for a, b in zip(found, function(weight, *Stage.given), strict=True):
            torch.testing.assert_close(a, b)
        return self.did


CAPTURED = ["plain", "capture", "replay", "replay"]  # to compare with, once to compare, and the call's own


@pytest.fixture
def log(monkeypatch) -> Log:
    return Log(monkeypatch, Rows({1}, {2: 3}, set(), {3}, [1, 2, 0]))


def test_the_second_call_of_a_bucket_is_captured_and_all_later_ones_are_replays(log):
    assert log.of(5) == ["plain"] and log.of(6) == CAPTURED
    assert log.of(5) == log.of(6) == ["replay"]
    assert log.of(7) == ["plain"] and log.of(0) == ["plain"]
    assert log.findings.graphs == "one CUDA graph for each bucket of batch sizes"


def test_more_ids_than_a_graph_has_room_for_take_a_new_one(log):
    log.of(5), log.of(5)
    assert log.of(5, ids=100) == CAPTURED
    assert log.of(5, ids=90) == log.of(6, ids=0) == ["replay"]


def test_state_that_moved_takes_a_new_graph_and_an_update_does_not(log):
    log.of(5), log.of(5)
    log.weight.add_(1)
    assert log.of(5) == ["replay"]
    log.weight = log.weight.clone()
    assert log.of(5) == CAPTURED and log.of(5) == ["replay"]


def test_the_graph_that_was_not_used_for_longest_makes_room(log):
    sizes = [2**k for k in range(MOST_GRAPHS + 1)]
    for size in sizes[:-1]:
        log.of(size), log.of(size)
    assert log.of(1) == ["replay"]
    log.of(sizes[-1]), log.of(sizes[-1])
    assert log.of(1) == log.of(4) == ["replay"] and log.of(2) == CAPTURED


def test_without_rows_each_set_of_sizes_takes_a_graph(monkeypatch):
    log = Log(monkeypatch, None)
    assert log.of(5) == ["plain"] and log.of(5) == CAPTURED
    assert log.of(6) == ["plain"] and log.of(5, ids=8) == ["plain"] and log.of(5) == ["replay"]
    assert "rows may not be padded" in log.findings.graphs and "rows are mixed" in log.findings.graphs


def test_a_capture_that_fails_and_a_replay_that_is_wrong_leave_calls_as_they_are(log, monkeypatch):
    log.of(5)
    log.broken = RuntimeError("it waits for the device\nsomewhere")
    assert log.of(5)[-1] == "plain" and log.of(5) == ["plain"]
    assert log.findings.graphs == "no CUDA graphs: the capture failed: it waits for the device"
    other = Log(monkeypatch, Rows({1}, {2: 3}, set(), {3}, [1, 2, 0]))
    other.wrong = 1.0
    assert other.of(5) == ["plain"] and other.of(5)[-1] == "plain" and other.of(5) == ["plain"]
    assert other.findings.graphs == "no CUDA graphs: a replay gave another result than the call"
