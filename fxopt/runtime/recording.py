"""Captured graphs of one executable: how one is made of a call, and how it is replayed.

A graph reads copies of the inputs, and state by its address. It copies its outputs to memory of the caller's own. All
graphs of an executable work in the same memory, so one replay follows another, on whatever streams. They are captured
on a stream that nobody else has, because cuBLAS has a workspace a stream: graphs of other models may run beside them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxopt.kernels import reports
from fxopt.kernels.side_stream import beside, fork, new_stream
from fxopt.kernels.stage import op as stage
from fxopt.patterns.row_wise import Rows
from fxopt.runtime.capturable import clamps, ready
from fxopt.runtime.executable import Executable
from fxopt.runtime.graph_memory import GraphMemory
from fxopt.runtime.padding import Padding
from fxopt.torch_internals.cuda import current_raw_stream
from fxopt.tune.cuda_graph import capture, keep_workspace

_WARM_UPS = 2
_AGREES = 0.02  # of the largest value: a padded graph against the same call without; TF32 differs by 1e-3
_free_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)  # by device; none is ever destroyed


@dataclass
class Recording:
    """One captured graph.

    Attributes:
        by: who made it and replays it.
        copies: the inputs that it reads, padded.
        targets: of its outputs, which it copies there where it delivers; else they are copied behind it.
        fixed: the state and the constants that it reads, by address.
        capacity: rows of each input.
        real_rows: of the batch, which it reads where clamped ids are counted: see kernels/reports.py.
        staged: bytes of the copies of its inputs.
        stream: the last one that it was replayed on, by number.
    """

    by: Recorder
    graph: torch.cuda.CUDAGraph
    copies: stage.Stage
    outputs: list[Tensor]
    targets: stage.Targets
    delivers: bool
    fixed: tuple[stage.Fixed, stage.Fixed]
    capacity: list[int]
    real_rows: Tensor | None
    kept: list[Any]
    staged: int
    stream: int


class Recorder:
    """Makes graphs of calls ``run(*state, *inputs)`` and replays them.

    Attributes:
        padding: which calls one graph serves.
        memory: what all graphs together hold.
    """

    def __init__(self, executable: Executable, device: torch.device, rows: Rows) -> None:
        module, specs = executable.graph, executable.capture.inputs
        assert module is not None
        self.device, self.padding = device, Padding(rows, specs, len(executable.capture.state))
        self.memory = GraphMemory(device)
        self._module, self._kept = ready(module, rows.are_padded)
        held = (getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
        self._constants = [constant for constant in held if isinstance(constant, Tensor)]
        self._clamps = clamps(module)
        self._branches = bool(module.graph.find_nodes(op="call_function", target=fork))
        self._side: torch.cuda.Stream | None = None
        self._stream: int | None = None
        self._done: torch.cuda.Event | None = None

    def record(self, state: Sequence[Tensor], inputs: stage.Inputs, rooms: Sequence[stage.Room]) -> Recording:
        """A graph of the call that `inputs` describes, in memory that `rooms` describes.

        Raises:
            RuntimeError: something waits for the device, or there is no memory.
        """
        capacity = self.padding.capacity(self.padding.batch(inputs))
        memory, stream = stage.Stage(rooms, self.device), current_raw_stream(self.device.index)
        memory.fill(inputs, stage.Targets(), stream)
        real_rows = memory.real_rows if self._clamps else None
        counts = {memory.tensors[k].data_ptr(): memory.counts[k].data_ptr() for k in self.padding.ids}
        with reports.padded(real_rows, max(1, capacity), counts):  # no row is real before the replay
            graph, outputs, delivers = self._captured([*state, *memory.tensors], memory)
        targets = stage.Targets(outputs, self.padding.rows_of(outputs)) if delivers else stage.Targets()
        fixed = stage.Fixed(state), stage.Fixed(self._constants)
        capacities = [room.capacity for room in rooms]
        kept, staged = list(self._kept), stage.bytes_of(rooms)
        return Recording(
            self, graph, memory, outputs, targets, delivers, fixed, capacities, real_rows, kept, staged, stream
        )

    def serves(self, recording: Recording, state: Sequence[Tensor], inputs: stage.Inputs) -> bool:
        """Whether nothing has moved that the graph reads, and its ids have room."""
        weights, constants = recording.fixed
        return (
            weights.holds(state)
            and constants.holds(self._constants)
            and self.padding.has_room(inputs, recording.capacity)
        )

    def replay(self, recording: Recording, inputs: stage.Inputs, batch: int, counts: bool = True) -> list[Tensor]:
        """The outputs in memory of their own. counts: the ids that it clamps."""
        stream = current_raw_stream(self.device.index)
        if stream != self._stream or stream != recording.stream:
            self._follow(recording, stream)
        targets = recording.targets
        targets.count(batch if counts else 0)
        outputs = targets.fresh(batch)
        recording.copies.fill(inputs, targets, stream)
        recording.graph.replay()
        if not recording.delivers:
            outputs = [rows.clone() for rows in self.padding.own_rows(recording.outputs, batch)]
        if self._done is not None:
            self._done.record()
        return outputs

    def _follow(self, recording: Recording, number: int) -> None:
        """The current stream waits for the last replay. Its end is recorded, but for that on the default stream: any
        other may be gone when the next call comes."""
        stream = torch.cuda.current_stream()
        if self._done is not None:
            stream.wait_event(self._done)
        elif self._stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
        self._done = torch.cuda.Event() if number else None
        self._stream = recording.stream = number
        recording.copies.used_on(stream)

    def _captured(self, tensors: list[Tensor], memory: stage.Stage) -> tuple[torch.cuda.CUDAGraph, list[Tensor], bool]:
        """The graph, its outputs, and whether it delivers them."""
        self._kept.clear()
        side, graph = self._own_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()  # replays of the other graphs, on whatever stream: they work in the same memory
        for stream in (side, beside(side) if self._branches else None):
            if stream is not None:
                keep_workspace(stream)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._module(*tensors)
        torch.cuda.synchronize()
        with capture(graph, side, self.memory.begun()):
            outputs = list(self._module(*tensors))
            delivers = memory.deliver(outputs, side.cuda_stream)
        return graph, outputs, delivers

    def _own_stream(self) -> torch.cuda.Stream:
        if self._side is None:
            free = _free_streams[self.device.index]
            self._side = free.pop() if free else new_stream(self.device.index) or torch.cuda.Stream()
            weakref.finalize(self, free.append, self._side)
        return self._side


def agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Roughly: another order of additions passes, rows in the wrong place do not."""
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return False
            continue
        finite = b.isfinite() & a.isfinite()
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        scale = torch.where(finite, b.abs(), 0).amax() if b.numel() else b.new_ones(())
        if b.numel() and float(torch.where(finite, (a - b).abs(), 0).amax()) > _AGREES * float(scale) + 1e-6:
            return False
    return True
