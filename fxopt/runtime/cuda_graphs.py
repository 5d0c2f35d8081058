"""One executable as captured CUDA graphs: a call is one launch that copies the inputs, one replay, one copy out.

A graph serves a bucket of batch sizes where rows do not depend on each other (patterns/row_wise.py), else one set of
sizes. The first call of a bucket runs as it is, the second is captured. What a graph reads besides its inputs is state,
by address: a tensor that has moved since means a new capture, any other update takes effect by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxopt.kernels import reports
from fxopt.kernels.cache import BuildError
from fxopt.kernels.columns import errors as columns_errors
from fxopt.kernels.stage import op as stage
from fxopt.locks import lock
from fxopt.patterns.row_wise import NotRowWise, Rows, row_wise
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.runtime.capturable import NoGraph, clamps, ready, suited
from fxopt.runtime.executable import Executable
from fxopt.runtime.padding import Padding
from fxopt.tune.cuda_graph import capture

MOST_GRAPHS = 16
_WARM_UPS = 2
_AGREES = 0.02  # of the largest value: a padded graph against the same call without; TF32 differs by 1e-3


def graphed(executable: Executable) -> Callable[..., Sequence[Any]]:
    """`executable.run` by captured graphs where it can be, else itself; the findings say why not."""
    try:
        return Replays(executable)
    except (NoGraph, BuildError, OSError) as reason:
        executable.findings.graphs = f"no CUDA graphs: {reason}"
        return executable.run


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    stage: stage.Stage
    outputs: list[Tensor]
    state: Tensor  # addresses
    capacity: list[int]  # rows of each input
    real_rows: Tensor | None  # of the batch, where clamped ids are counted: see kernels/reports.py
    keep: list[Any]


class Replays:
    """``run(*state, *inputs)`` by graphs. Thread safe; calls on several streams follow each other.

    Raises:
        NoGraph: gradients, side effects, other devices.
    """

    def __init__(self, executable: Executable) -> None:
        self._plain, self._capture = executable.run, executable.capture
        self._findings = executable.findings
        module, specs = executable.graph, executable.capture.inputs
        assert module is not None
        self._n_state = len(executable.capture.state)
        self._device = suited(module.graph, self._n_state, [spec.device.type == "cpu" for spec in specs])
        if len(specs) > stage.MOST_INPUTS:
            raise NoGraph(f"{len(specs)} inputs, expected at most {stage.MOST_INPUTS}")
        stage.pointers(), stage.kernel(self._device.index)
        rows: Rows | None = None
        try:
            rows = row_wise(module.graph, partial(plan_in, module))
        except NotRowWise as reason:
            executable.findings.graphs = (
                f"one CUDA graph for each set of sizes, because rows may not be padded: {reason}"
            )
        else:
            executable.findings.graphs = "one CUDA graph for each bucket of batch sizes"
        self._clamps = clamps(module)
        self._module, self._kept = ready(module, rows)
        self._padding = Padding(rows, specs, self._n_state)
        self._inputs = stage.Inputs(len(specs))
        self._graphs: OrderedDict[tuple, _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple, None] = OrderedDict()
        self._lock = lock()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        if torch.cuda.is_current_stream_capturing():
            return self._plain(*tensors)
        columns_errors.raise_reported(self._device.index)
        with self._lock, torch.cuda.device(self._device), torch.no_grad():
            return self._call(tensors)

    def _call(self, tensors: Sequence[Any]) -> Sequence[Any]:
        inputs = self._inputs.read(tensors, self._n_state)
        batch = self._padding.batch(self._inputs)
        if batch == 0:
            return self._plain(*tensors)
        capacity = self._padding.capacity(batch)
        key = (capacity, *self._padding.sizes(tensors))
        known = self._graphs.get(key)
        if known is None and not self._again(key):
            return self._plain(*tensors)
        if known is None or not self._serves(known, inputs):
            known = self._captured(key, capacity, inputs, known)
            if known is None:
                return self._plain(*tensors)
        self._graphs.move_to_end(key)
        return self._replayed(known, batch)

    def _replayed(self, known: _Captured, batch: int, counts: bool = True) -> list[Tensor]:
        """The outputs in memory of their own. counts: the ids that it clamps."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # whose calls use the same memory
        self._stream = stream
        known.stage.fill(self._inputs, stream)
        if known.real_rows is not None:
            known.real_rows.fill_(batch if counts else 0)
        known.graph.replay()
        return [rows.clone() for rows in self._padding.own_rows(known.outputs, batch)]

    def _again(self, key: tuple) -> bool:
        """Whether these sizes came before."""
        seen = key in self._seen
        self._seen[key] = None
        if len(self._seen) > 4 * MOST_GRAPHS:
            self._seen.popitem(last=False)
        return seen

    def _serves(self, known: _Captured, tensors: Sequence[Tensor]) -> bool:
        unmoved = stage.pointers().unmoved(tensors, self._n_state, known.state.data_ptr())
        return unmoved and self._padding.has_room(self._inputs, known.capacity)

    def _captured(
        self, key: tuple, capacity: int, tensors: Sequence[Tensor], before: _Captured | None
    ) -> _Captured | None:
        """A graph for these sizes; None where they cannot be padded so, or nothing can be captured."""
        self._graphs.pop(key, None)
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        rooms = self._padding.rooms(tensors[self._n_state :], capacity, before.capacity if before else None)
        state = list(tensors[: self._n_state])
        addresses = torch.zeros(max(1, self._n_state), dtype=torch.int64, device="cpu")
        stage.pointers().addresses(tensors, self._n_state, addresses.data_ptr())
        with torch.inference_mode(False):  # whose tensors nothing outside may write to
            real_rows = torch.zeros(1, dtype=torch.int64, device=self._device) if self._clamps else None
        uncounted = partial(reports.padded, real_rows, max(1, capacity))  # no row is real before the replay
        with uncounted():
            expected = self._plain(*tensors)
        torch.cuda.synchronize(self._device)  # the memory of the last graph is still in use
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            memory = stage.Stage(rooms, self._device)
            memory.fill(self._inputs, torch.cuda.current_stream())
            with uncounted():
                graph, outputs = self._record([*state, *memory.tensors])
        except (RuntimeError, ValueError, TypeError) as error:
            self._graphs.clear()
            self._give_up(f"the capture failed: {str(error).splitlines()[0]}")
            return None
        capacities = [room.capacity for room in rooms]
        known = _Captured(graph, memory, outputs, addresses, capacities, real_rows, list(self._kept))
        if not _agree(self._replayed(known, self._padding.batch(self._inputs), counts=False), expected):
            self._give_up("a replay gave another result than the call")
            return None
        self._graphs[key] = known
        return known

    def _give_up(self, reason: str) -> None:
        """Calls from now on run as they are."""
        self._findings.graphs = f"no CUDA graphs: {reason}"
        self._call = lambda tensors: self._plain(*tensors)  # type: ignore[method-assign]

    def _record(self, tensors: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        self._kept.clear()
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._module(*tensors)
            current.wait_stream(side)
            torch.cuda.synchronize(self._device)
            with capture(graph, side, self._pool):
                outputs = list(self._module(*tensors))
        return graph, outputs


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
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
