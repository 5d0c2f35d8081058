"""Timing on a GPU: what the machine can do, calls as a user makes them, and replays of a captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

GIGABYTE = 1e9
SLICE = 0.02  # seconds of calls between two looks at the clock
ROUNDS = 7


@dataclass(frozen=True)
class Gpu:
    """copy_gbs counts bytes read and written, read_gbs those a reduction reads, write_gbs those a fill writes;
    tf32_tflops and bf16_tflops of a product of random 8192 x 8192; launch_us and replay_us a kernel of one element,
    called and as a captured graph."""

    name: str
    torch: str
    cuda: str
    copy_gbs: float
    read_gbs: float
    write_gbs: float
    tf32_tflops: float
    bf16_tflops: float
    launch_us: float
    replay_us: float

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        moved = f"copies {self.copy_gbs:.0f} GB/s, reads {self.read_gbs:.0f}, writes {self.write_gbs:.0f}"
        products = f"products {self.tf32_tflops:.0f} TFLOP/s in TF32, {self.bf16_tflops:.0f} in bf16"
        launches = f"a launch {self.launch_us:.1f} us, a replay {self.replay_us:.1f} us"
        return f"{self.name}, torch {self.torch}, CUDA {self.cuda}: {moved}; {products}; {launches}"

    def floor(self, read: float, written: float, flops: float = 0.0, halves: bool = False) -> float:
        """Seconds for so many bytes, read and then written, or operations, whichever takes longer."""
        moved = read / (self.read_gbs * GIGABYTE) + written / (self.write_gbs * GIGABYTE)
        return max(moved, flops / (1e12 * (self.bf16_tflops if halves else self.tf32_tflops)))


def measure_gpu() -> Gpu:
    n = 1 << 30
    source = torch.randint(0, 127, (n,), dtype=torch.int8, device="cuda").view(torch.float32)
    target, one = torch.empty_like(source), torch.zeros(1, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    short_a, short_b = a.bfloat16(), b.bfloat16()
    warm_up(lambda: a @ b)
    return Gpu(
        name=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        copy_gbs=2 * n / seconds_of(replayed(lambda: target.copy_(source))) / GIGABYTE,
        read_gbs=n / seconds_of(replayed(lambda: source.sum())) / GIGABYTE,
        write_gbs=n / seconds_of(replayed(lambda: target.fill_(1.5))) / GIGABYTE,
        tf32_tflops=2 * 8192**3 / seconds_of(replayed(lambda: a @ b)) / 1e12,
        bf16_tflops=2 * 8192**3 / seconds_of(replayed(lambda: short_a @ short_b)) / 1e12,
        launch_us=seconds_of(lambda: one.add_(1)) * 1e6,
        replay_us=seconds_of(replayed(lambda: one.add_(1))) * 1e6,
    )


def warm_up(call: Callable[[], object], seconds: float = 0.3) -> None:
    """Clocks rise within some hundred milliseconds of work."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds per call, many of them in a row: the median of rounds, by device events."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(3, min(200, int(SLICE / (time.perf_counter() - start))))
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(rounds)


def seconds_cold(replay: Callable[[], object]) -> float:
    """Seconds of one replay with nothing of it in L2: the median, each after writing more than a cache holds.

    The device is still writing when the replay is queued, so the host's part of the launch is not counted.
    """
    other = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(4 * ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.fill_(1)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """`call` captured into a graph, which every replay overwrites the result of."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> object:
        graph.replay()
        return result

    return replay
