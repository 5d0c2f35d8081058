"""How contenders are timed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fxopt.tune import clock
from fxopt.tune.clock import all_captured, captured, on_device_of


class Stream:
    device_index, device = 0, "cpu"

    def wait_stream(self, other: Stream) -> None: ...


class Broken:
    """torch.cuda.graph where the capture ends in an error: the stream that it chose stays the current one."""

    def __init__(self, graph: object, pool: object, stream: Stream, capture_error_mode: str) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)  # type: ignore[arg-type]

    def __exit__(self, *raised: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_capture_that_fails_leaves_stream_and_allocator_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that ends well follows, for the generator."""
    before, told = Stream(), list[object]()
    current = [before]

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            told.append("begin")

        def capture_end(self) -> None:
            told.append("end")

    stand_ins = {
        "Stream": Stream,
        "current_stream": lambda: current[-1],
        "set_stream": current.append,
        "stream": lambda side: nullcontext(),
        "synchronize": lambda device: None,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 7),
        "graph": Broken,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: told.append((name, device, pool)))
    assert captured(nothing) is nothing
    assert current[-1] is before and len(current) == 3
    assert told == [("_cuda_endAllocateToPool", 0, (0, 7)), ("_cuda_releasePool", 0, (0, 7)), "begin", "end"]


def nothing() -> None: ...


def replay() -> None: ...


def test_a_graph_is_timed_against_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [nothing, list]
    monkeypatch.setattr(clock, "captured", lambda run, calls=1: replay)
    assert all_captured(runs) == [replay, replay]
    monkeypatch.setattr(clock, "captured", lambda run, calls=1: run if run is nothing else replay)
    assert all_captured(runs) == runs


@pytest.mark.parametrize(("seconds", "calls"), [((2e-6, 3e-5), 10), ((2e-6, 9e-5), 1)])
def test_graphs_hold_several_calls_where_all_are_short(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], calls: int
) -> None:
    monkeypatch.setattr(clock, "captured", lambda run, calls=1: (run, calls))
    monkeypatch.setattr(clock, "once", lambda graph: graph[0])
    assert all_captured(seconds) == [(each, calls) for each in seconds]  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.gpu
def test_what_waits_for_the_device_is_not_captured() -> None:
    x, before = torch.ones(3, device="cuda"), torch.cuda.current_stream()

    def waits() -> object:
        return x.sum().item()

    assert captured(waits) is waits and torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    torch.rand(3, device="cuda")  # the generator has not lost its way in the capture

    def adds() -> object:
        return x.add_(1)

    again = captured(adds)  # the next one is
    assert again is not adds
    again()
    assert x.tolist() == [3.0] * 3 and torch.cuda.current_stream() == before


@pytest.mark.gpu
def test_a_short_graph_is_ten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_SHORT_REPLAY", 10.0)  # seconds: also where other processes use the GPU
    x = torch.zeros(3, device="cuda")
    adds, _ = all_captured([lambda: x.add_(1), lambda: x.sin()])
    x.zero_()
    adds()
    assert x.tolist() == [10.0] * 3


def test_what_is_on_the_cpu_needs_no_device() -> None:
    with on_device_of([torch.ones(3), 4, None]):
        pass
