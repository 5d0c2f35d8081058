"""When calls are captured and replayed: through stand-ins for what needs a GPU, so that this runs everywhere."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fxopt import Config, optimize
from fxopt.capture import capture
from fxopt.capture.inputs import TensorSpec
from fxopt.findings import Findings
from fxopt.kernels.stage import op as stage
from fxopt.patterns.row_wise import NotRowWise, Rows
from fxopt.runtime import cuda_graphs, graph_memory, recording
from fxopt.runtime.cuda_graphs import MOST_GRAPHS, Replays
from fxopt.shape.strides import Layout, Strides


def function(weight: Tensor, x: Tensor, offsets: Tensor, ids: Tensor) -> list[Tensor]:
    """Outputs of B rows, of 2 B, and of as many as the weight has."""
    return [x @ weight, x.repeat_interleave(2, 0), weight * 2]


def call(batch: int, ids: int) -> list[Tensor]:
    zeros = [torch.zeros(n, dtype=torch.int64) for n in (batch, ids)]
    return [torch.randn(batch, 4), *zeros]


class Stage:
    """Static memory that `inputs` are copied to by torch."""

    streams: list[object]  # that it was used on

    given: list[Tensor]  # what the call in progress was called with
    targets: stage.Targets  # of the call in progress

    def __init__(self, rooms, device) -> None:
        self.streams, self.real_rows = [], torch.zeros(1, dtype=torch.int64)
        self.tensors = [torch.zeros(room.shape, dtype=room.dtype) for room in rooms]
        self.counts = torch.zeros(len(rooms), dtype=torch.int64)

    def used_on(self, stream) -> None:
        self.streams.append(stream)

    def fill(self, inputs, targets, stream) -> None:
        Stage.targets = targets
        for static, x in zip(self.tensors, self.given, strict=True):
            static.zero_()[: len(x)] = x


class Graph:
    def __init__(self, run, outputs, delivers) -> None:
        self.run, self.outputs, self.delivers = run, outputs, delivers

    def replay(self) -> None:
        for static, new in zip(self.outputs, self.run(), strict=True):
            static.copy_(new)
        if self.delivers:
            _, _, *words = (ctypes.c_int64 * (2 + 2 * len(self.outputs))).from_address(Stage.targets.at)
            for static, to, count in zip(self.outputs, words[::2], words[1::2], strict=True):
                ctypes.memmove(to, static.data_ptr(), count)


class Stream:
    """What it was told to wait for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other) -> None:
        self.waited.append(other)

    wait_event = wait_stream


class Event:
    recorded = 0

    def record(self) -> None:
        self.recorded += 1


MB = 1 << 20


class Log:
    """What each call did: "plain" eager, "capture", "replay".

    Attributes:
        delivers: whether graphs copy their outputs out themselves.
        times: of the call and of a replay, as timed; None: they are not timed.
        pool: bytes that the graphs' pool holds; free: that the device has.
    """

    def __init__(self, monkeypatch, rows: Rows | None, chosen: bool = True) -> None:
        self.did: list[str] = []
        self.broken: Exception | None = None
        self.failing: list[Exception] = []
        self.wrong = 0.0
        self.times = 2e-3, 1e-3
        self.pool, self.free, self.stream = MB, 800 * MB, 0
        self.delivers = True
        self.streams = {0: Stream(), 7: Stream(), 8: Stream()}
        self.findings = Findings("")
        self.weight = torch.randn(4, 3)
        self.constants = [torch.tensor(2.0), torch.zeros(3)]
        specs = [("s0", 4), ("s0",), ("s1",)]
        dtypes = [torch.float32, torch.int64, torch.int64]
        inputs = tuple(TensorSpec("x", t, torch.device("cpu"), dims) for t, dims in zip(dtypes, specs, strict=True))
        capture = SimpleNamespace(state=[0], inputs=inputs)
        monkeypatch.setattr(stage, "kernel", lambda device: None)
        monkeypatch.setattr(stage, "Stage", Stage)
        for module, name, value in [
            (cuda_graphs, "suited", lambda *_: torch.device("cuda", 0)),
            (cuda_graphs, "draws", lambda graph: None),
            (cuda_graphs, "row_wise", lambda *_: self.rows(rows)),
            (
                cuda_graphs,
                "fastest",
                lambda runs, *_, **__: [run() and time for run, time in zip(runs, self.times, strict=True)],
            ),
            (recording, "clamps", lambda module: False),
            (recording, "ready", lambda module, rows: (function, [])),
            (recording, "current_raw_stream", lambda device: self.stream),
            (cuda_graphs.columns_errors, "raise_reported", lambda index: None),
            (graph_memory, "_everywhere", set()),
            (graph_memory, "bytes_of_pool", lambda pool: self.pool),
        ]:
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(recording.Recorder, "_captured", lambda _, tensors, memory: self.record(tensors))
        for name, result in {
            "is_current_stream_capturing": False, "synchronize": None, "current_device": 0, "memory_reserved": 0,
            "memory_allocated": 0, "default_stream": self.streams[0],
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.streams[self.stream])
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        graph = torch.fx.Graph()
        for number in range(len(self.constants)):
            graph.get_attr(f"constant{number}")
        graph.output(())
        root = torch.nn.Module()
        for number, constant in enumerate(self.constants):
            root.register_buffer(f"constant{number}", constant)
        module = torch.fx.GraphModule(root, graph)
        executable = SimpleNamespace(run=self.plain, capture=capture, findings=self.findings, graph=module)
        self.replays = Replays(executable, chosen)  # type: ignore[arg-type]

    def rows(self, rows: Rows | None) -> Rows:
        if rows is None:
            raise NotRowWise(torch.fx.Graph().placeholder("x"), "rows are mixed")
        return rows

    def plain(self, *tensors: Tensor) -> list[Tensor]:
        self.did.append("plain")
        if self.failing:
            raise self.failing.pop()
        return function(*tensors)

    def record(self, tensors):
        self.did.append("capture")
        if self.broken:
            raise self.broken
        self.replays._whole.memory.begun()
        outputs = function(*tensors)

        def run():
            self.did.append("replay")
            return [x + self.wrong for x in function(*tensors)]

        delivers = self.delivers and all(x.is_contiguous() for x in outputs)
        return Graph(run, outputs, delivers), outputs, delivers

    def of(self, batch: int, ids: int = 9) -> list[str]:
        """What a call does, whose answer is eager's."""
        self.did, weight = [], self.weight
        Stage.given = call(batch, ids)
        found = self.replays(weight, *Stage.given)
        for a, b in zip(found, function(weight, *Stage.given), strict=True):
            torch.testing.assert_close(a, b)
        return self.did


CAPTURED = ["plain", "capture", "replay"]  # the call, and a graph that is compared with it
TIMED = [*CAPTURED, "plain", "replay"]
JAGGED = Rows({1}, {2: 3}, set(), {3}, [1, 2, 0])


@pytest.fixture
def log(monkeypatch) -> Log:
    return Log(monkeypatch, JAGGED)


@pytest.fixture
def auto(monkeypatch) -> Log:
    return Log(monkeypatch, JAGGED, chosen=False)


def test_the_second_call_of_a_bucket_is_captured_and_all_later_ones_are_replays(log):
    assert log.of(5) == ["plain"] and log.of(6) == CAPTURED
    assert log.of(5) == log.of(6) == ["replay"]
    assert log.of(7) == ["plain"] and log.of(0) == ["plain"]
    assert log.findings.graphs == "one CUDA graph for each bucket of batch sizes; 1 graph holds 1 MB"


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


def test_state_that_lies_otherwise_and_constants_that_moved_take_a_new_graph(log):
    log.weight = torch.randn(3, 4).t()
    log.of(5), log.of(5)
    log.weight.data = log.weight.data.as_strided((4, 3), (3, 1))
    assert log.of(5) == CAPTURED and log.of(5) == ["replay"]
    log.constants[1].data = torch.zeros(3)
    assert log.of(5) == CAPTURED and log.of(5) == ["replay"]
    log.constants[0].fill_(3.0)  # a number on the CPU, which launches take along
    assert log.of(5) == CAPTURED and log.of(5) == ["replay"]
    log.constants[1].fill_(3.0)
    assert log.of(5) == ["replay"]


def test_the_graph_that_was_not_used_for_longest_makes_room(log):
    sizes = [2**k for k in range(MOST_GRAPHS + 1)]
    for size in sizes[:-1]:
        log.of(size), log.of(size)
    for _ in range(2 * cuda_graphs._PAYS):
        assert log.of(1) == ["replay"]
    log.of(sizes[-1]), log.of(sizes[-1])
    assert log.of(1) == log.of(4) == ["replay"] and log.of(2) == CAPTURED


def test_captures_that_do_not_pay_end(log):
    captures = 0
    for _ in range(4 * MOST_GRAPHS):
        log.weight = log.weight.clone()
        captures += "capture" in log.of(5)
    assert captures == MOST_GRAPHS and log.of(5) == ["plain"]
    assert "change too often: 16 captures served 0 calls" in log.findings.graphs


def test_without_rows_each_set_of_sizes_takes_a_graph(monkeypatch):
    log = Log(monkeypatch, None)
    assert log.of(5) == ["plain"] and log.of(5) == CAPTURED
    assert log.of(6) == ["plain"] and log.of(5, ids=8) == ["plain"] and log.of(5) == ["replay"]
    assert "rows may not be padded" in log.findings.graphs and "rows are mixed" in log.findings.graphs


def test_a_capture_that_fails_and_a_replay_that_is_wrong_leave_calls_as_they_are(log, monkeypatch):
    log.of(5)
    log.broken = RuntimeError("it waits for the device\nsomewhere")
    assert log.of(5) == ["plain", "capture"] and log.of(5) == ["plain"]
    assert log.findings.graphs == "no CUDA graphs: the capture failed: it waits for the device"
    other = Log(monkeypatch, JAGGED)
    other.wrong = 1.0
    assert other.of(5) == ["plain"] and other.of(5) == CAPTURED and other.of(5) == ["plain"]
    assert other.findings.graphs == "no CUDA graphs: a replay gave another result than the call"


def test_graphs_stay_where_they_are_faster(auto):
    assert auto.of(5) == ["plain"] and auto.of(5) == TIMED and auto.of(5) == ["replay"]
    auto.times = 1e-3, 2e-3
    assert auto.of(9) == ["plain"] and auto.of(9) == TIMED and auto.of(9) == auto.of(9) == ["plain"]
    assert auto.of(5) == ["replay"]
    assert "at batch 9 calls run as they are: a replay took 2,000 us, and the call 1,000 us" in auto.findings.graphs


def test_graphs_hold_an_eighth_of_the_free_memory(auto):
    auto.free = 16 * MB
    assert auto.of(5) == ["plain"] and auto.of(5) == TIMED and auto.of(5) == ["replay"]
    auto.pool = 3 * MB  # with the next graph: too much for both, and too much for one
    assert auto.of(9) == ["plain"] and auto.of(9) == TIMED
    assert not auto.replays._graphs and not auto.replays._whole.memory.held
    assert auto.of(9) == TIMED and auto.of(9) == auto.of(9) == ["plain"]
    assert "graphs would hold 3 MB, and they may hold 2 MB" in auto.findings.graphs
    auto.pool = MB
    assert auto.of(5) == TIMED and auto.of(5) == ["replay"]


def test_inputs_that_are_too_large_to_be_copied_are_not(auto):
    auto.of(10**5), auto.of(5), auto.of(5)
    auto.free = 16 * MB
    assert auto.of(10**5) == ["plain"] and auto.of(5) == ["replay"]
    assert "an eighth of the memory" in auto.findings.graphs


def test_a_call_that_needs_the_memory_of_graphs_gets_it(log):
    log.of(5), log.of(5), log.of(9)
    log.failing = [torch.cuda.OutOfMemoryError("no memory")]
    assert log.of(17) == ["plain", "plain"] and log.of(5) == ["plain"]
    assert log.findings.graphs == "no CUDA graphs: a call needed the memory that they held"
    log.failing = [torch.cuda.OutOfMemoryError("no memory")]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        log.of(5)


def test_a_call_on_another_stream_waits_for_the_last_replay(log):
    log.of(5), log.of(5), log.of(5)
    waited = log.streams[7].waited
    log.stream = 7
    assert log.of(5) == log.of(5) == ["replay"] and waited == [log.streams[0]]
    log.stream = 8
    assert log.of(5) == ["replay"]
    ((event,), (graph,)) = log.streams[8].waited, log.replays._graphs.values()
    assert isinstance(event, Event) and event.recorded == 2
    assert graph.copies.streams[-2:] == [log.streams[7], log.streams[8]], "its memory is not given out before they end"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_calls_answers_are_those_of_the_call(monkeypatch, seed):
    rng, log = random.Random(seed), Log(monkeypatch, JAGGED, chosen=seed == 0)
    replayed, events = 0, [
        lambda: setattr(log, "weight", torch.randn(4, 3)),
        lambda: log.weight.mul_(2),
        lambda: setattr(log.weight, "data", torch.randn(3, 4).t()),
        lambda: log.constants[0].add_(1),
        lambda: setattr(log, "free", rng.choice((8, 16, 64, 800)) * MB),
        lambda: setattr(log, "pool", rng.choice((1, 2, 3)) * MB),
        lambda: setattr(log, "times", rng.choice(((2e-3, 1e-3), (1e-3, 2e-3)))),
        lambda: setattr(log, "stream", rng.choice((0, 7, 8))),
        lambda: setattr(log, "delivers", not log.delivers),
    ]  # fmt: skip
    for _ in range(300):
        if rng.random() < 0.05:
            rng.choice(events)()
        replayed += log.of(rng.choice((0, 1, 2, 5, 6, 40)), rng.choice((0, 3, 30))) == ["replay"]
        memory = log.replays._whole.memory
        assert bool(memory.held) == bool(log.replays._graphs) == (memory.pool is not None)
        assert len(log.replays._graphs) <= MOST_GRAPHS
    assert replayed > 20


def test_calls_of_other_threads_run_as_they_are_during_a_capture(log):
    log.of(5), log.of(5)
    log.replays._recording = True
    assert log.of(5) == ["plain"]
    log.replays._recording = False
    assert log.of(5) == ["replay"]


def test_who_asks_for_graphs_is_told_and_a_model_on_the_cpu_is_silent_by_default():
    with pytest.raises(ValueError, match="cuda_graphs: expected 'auto', True or False, found 'always'"):
        Config(cuda_graphs="always")
    for mode, told in (
        ("auto", ""),
        (False, ""),
        (True, "no CUDA graphs: nothing of it is on a CUDA device"),
    ):
        with torch.no_grad():
            (entry,) = optimize(torch.nn.ReLU(), torch.zeros(3), Config(cuda_graphs=mode, tune="off"))._fxopt.entries
        assert entry.findings.graphs == told


@pytest.mark.parametrize(
    ("function", "may"),
    [
        (lambda x: torch.nn.functional.linear(x.t(), torch.ones(2, 5)), False),
        (lambda x: x.t().contiguous().relu(), False),
        (lambda x: x.t().relu(), True),
        (lambda x: (x.sum(1).unsqueeze(1) * 2, x.t() + 1), True),
    ],
)
def test_whose_results_may_lie_as_its_inputs(function, may):
    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    graph = capture(Model(), (torch.randn(5, 5),), {}).graph
    assert (Strides(graph.graph).known_of_outputs() is not Layout.CONTIGUOUS) is may
