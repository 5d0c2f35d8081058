"""One executable by captured CUDA graphs: a call is one launch that copies the inputs, and one replay.

A graph serves a bucket of batch sizes where rows do not depend on each other (patterns/row_wise.py), else one set of
sizes. The first call of a bucket runs as it is, and so does the second, of which a graph is then captured. It is kept
if it computes the same, is faster (unless the user has decided) and the memory that it holds may be spared. What it
reads besides its inputs is state, by address: a tensor that has moved since means a new capture, any other update takes
effect by itself. Random numbers are drawn from the generator of the device, as many as the call draws.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt.kernels import reports
from fxopt.kernels.cache import BuildError
from fxopt.kernels.columns import errors as columns_errors
from fxopt.kernels.stage import op as stage
from fxopt.locks import lock
from fxopt.patterns.row_wise import NotRowWise, Rows, loose_ids, row_wise
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.runtime.capturable import NoGraph, draws, is_on_cuda, suited
from fxopt.runtime.executable import Executable
from fxopt.runtime.recording import Recorder, Recording, agree
from fxopt.runtime.stores import Stores
from fxopt.runtime.tail import Tail, is_large
from fxopt.shape.strides import Layout, Strides
from fxopt.tune.clock import fastest

MOST_GRAPHS = 16
_PAYS = 256  # replays for each capture behind the first: one costs about as much as so many launch-bound calls


class Refused(Exception):
    """Why calls of these sizes run as they are."""


def graphed(executable: Executable, mode: bool | str) -> Callable[..., Sequence[Any]]:
    """`executable.run` by captured graphs where it can be, else itself; the findings say why not.

    Args:
        mode: "auto": where they are faster; True: wherever they are right; False: never.
    """
    if not mode or (mode == "auto" and not is_on_cuda(executable)):
        return executable.run
    try:
        return Replays(executable, chosen=mode is True)
    except (NoGraph, BuildError, OSError) as reason:
        executable.findings.graphs = f"no CUDA graphs: {reason}"
        return executable.run


def replayable(executable: Executable, mode: bool | str) -> bool:
    """Whether calls of it will be replays, as far as its graph tells."""
    try:
        return bool(mode) and suited(Stores(executable).executable).type == "cuda"
    except NoGraph:
        return False


class Replays:
    """``run(*state, *inputs)`` by graphs. Thread safe; calls on several streams follow each other.

    Args:
        chosen: whether graphs are wanted also where they are slower.

    Raises:
        NoGraph: gradients, side effects, other devices.
    """

    def __init__(self, executable: Executable, chosen: bool) -> None:
        self._plain, self._findings, self._chosen = executable.run, executable.findings, chosen
        self._stores = Stores(executable)
        executable = self._stores.executable
        self._device = suited(executable)
        count = len(executable.capture.inputs)
        if count > stage.MOST_INPUTS:
            raise NoGraph(f"{count} inputs, expected at most {stage.MOST_INPUTS}")
        stage.pointers(), stage.kernel(self._device.index)
        assert executable.graph is not None
        rows, self._kind = _served(executable.graph)
        self._random = draws(executable.graph.graph) is not None
        self._may_lie_as_inputs = Strides(executable.graph.graph).known_of_outputs() is not Layout.CONTIGUOUS
        self._findings.graphs = self._kind
        self._inputs, self._whole = stage.Inputs(count), Recorder(executable, self._device, rows)
        self._tail, self._cut = Tail(executable), self._whole
        if (cut := self._tail.executable).graph is not executable.graph:
            assert cut.graph is not None
            self._cut = Recorder(cut, self._device, _served(cut.graph)[0])
        self._n_state = len(executable.capture.state)
        self._graphs: OrderedDict[tuple, Recording] = OrderedDict()
        self._seen: OrderedDict[tuple, bool] = OrderedDict()  # sizes, and whether they run as they are from now on
        self._captures = self._replays = 0
        self._stopped = self._recording = False  # for good; while this or another thread captures
        self._refused = ""
        self._lock = lock()

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        return self.serve(tensors[: self._n_state], tensors[self._n_state :])

    def serve(self, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Any]:
        """The same, without putting thousands of tensors into one list."""
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.serve(state, inputs)
        if self._stopped or self._recording or torch.cuda.is_current_stream_capturing():
            return self._plain(*state, *inputs)
        columns_errors.raise_reported(self._device.index)
        with self._lock:
            outputs = self._by_graph(state, inputs)
        return self._as_it_is(state, inputs) if outputs is None else outputs

    def _by_graph(self, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Any] | None:
        """None: no graph serves the call."""
        tame, padding = self._inputs.read(inputs), self._whole.padding
        batch = padding.batch(self._inputs)
        if tame is None or batch == 0:
            return None
        if tame is not inputs and self._may_lie_as_inputs:  # of copies, which are contiguous
            self._tell("calls with transposed inputs run as they are: a result may lie as they do")
            return None
        key = (padding.capacity(batch), *padding.sizes(tame))
        known = self._graphs.get(key)
        if known is not None and known.by.serves(known, state, self._inputs):
            self._graphs.move_to_end(key)
            self._replays += 1
            return self._stores.put(self._replayed(known, state), state, inputs)
        return self._first(key, state, tame, known) if self._due(key) else None

    def _replayed(self, known: Recording, state: Sequence[Tensor], counts: bool = True) -> Sequence[Any]:
        results = known.by.replay(known, self._inputs, known.by.padding.batch(self._inputs), counts)
        return results if known.by is self._whole else self._tail.put(results, state)

    def _due(self, key: tuple) -> bool:
        """Whether these sizes came before, and captures have paid so far."""
        before = self._seen.get(key)
        self._seen[key] = bool(before)
        if len(self._seen) > 4 * MOST_GRAPHS:
            self._seen.popitem(last=False)
        if before is not False:
            return False
        if self._captures < MOST_GRAPHS + self._replays // _PAYS:
            return True
        self._tell(f"sizes or weights change too often: {self._captures} captures served {self._replays} calls")
        return False

    def _as_it_is(self, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Any]:
        """The call itself; the memory of graphs is given up where it needs that."""
        try:
            return self._plain(*state, *inputs)
        except torch.cuda.OutOfMemoryError:
            if not self._graphs:
                raise
        with self._lock:
            self._give_up("a call needed the memory that they held")
        return self._plain(*state, *inputs)

    def _first(
        self, key: tuple, state: Sequence[Tensor], inputs: Sequence[Tensor], before: Recording | None
    ) -> Sequence[Any]:
        """The call itself, and a graph of it for later ones."""
        numbers = torch.cuda.get_rng_state(self._device) if self._random else None
        result = self._as_it_is(state, inputs)
        if self._stopped:
            return result
        torch.cuda.synchronize(self._device)  # graphs that go, and the memory of those that stay, are in use until then
        self._graphs.pop(key, None)
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        self._captures += 1
        self._recording = True
        try:
            with torch.random.fork_rng([self._device.index], enabled=self._random), torch.inference_mode(False):
                made = self._made(self._cut if is_large(result) else self._whole, state, inputs, before)
                if numbers is not None:
                    torch.cuda.set_rng_state(numbers, self._device)
                self._compare(made, state, inputs, result)
                self._keep(key, made)
        except Refused as reason:
            self._seen[key] = True
            self._count()
            capacity, *sizes = key
            where = f"batch {self._whole.padding.batch(self._inputs):,}" if capacity else f"sizes {sizes}"
            self._tell(f"at {where} calls run as they are: {reason}")
        except NoGraph as reason:
            self._give_up(str(reason))
        except (RuntimeError, ValueError, TypeError) as error:
            self._give_up(f"the capture failed: {str(error).splitlines()[0]}")
        finally:
            self._recording = False
        return result

    @torch.no_grad()
    def _made(
        self, by: Recorder, state: Sequence[Tensor], inputs: Sequence[Tensor], before: Recording | None
    ) -> Recording:
        """Raises Refused where the copies of the inputs alone take too much memory."""
        capacity = by.padding.capacity(by.padding.batch(self._inputs))
        rooms = by.padding.rooms(inputs, capacity, before.capacity if before else None)
        if excess := by.memory.excess(stage.bytes_of(rooms)):
            raise Refused(excess)
        return by.record(state, self._inputs, rooms)

    @torch.no_grad()
    def _compare(
        self, made: Recording, state: Sequence[Tensor], inputs: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> None:
        """Raises NoGraph where a replay gives something else than the call, and Refused where it takes longer."""
        uncounted = partial(self._replayed, made, state, counts=False)
        if not agree(uncounted()[: len(expected)], expected):
            raise NoGraph("a replay gave another result than the call")
        if self._chosen:
            return
        with reports.padded(made.real_rows, 1):  # whose value now says that no row is real
            called, replayed = fastest([partial(self._plain, *state, *inputs), uncounted], 0.0, most=3)
        if replayed > called:
            raise Refused(f"a replay took {replayed * 1e6:,.0f} us, and the call {called * 1e6:,.0f} us")

    def _keep(self, key: tuple, made: Recording) -> None:
        """Raises Refused where there is no memory for the graph by itself; makes room for it where others take it."""
        memory, alone = made.by.memory, not self._graphs
        self._graphs[key] = made
        self._count()
        while self._graphs and (excess := memory.excess()):
            self._graphs.popitem(last=False)
            self._count()
        if alone and not self._graphs:
            raise Refused(excess)
        self._tell(self._refused)

    def _count(self) -> None:
        for by in {self._whole, self._cut}:
            by.memory.count(graph.staged for graph in self._graphs.values() if graph.by is by)

    def _tell(self, refused: str) -> None:
        """What the report says of these graphs."""
        self._refused = refused
        count, held = len(self._graphs), sum(by.memory.held for by in {self._whole, self._cut}) >> 20
        holds = f"{count} {'graphs hold' if count > 1 else 'graph holds'} {held:,} MB" if count else ""
        self._findings.graphs = "; ".join(filter(None, (self._kind, holds, refused)))

    def _give_up(self, reason: str) -> None:
        """Calls from now on run as they are."""
        self._stopped = True
        self._graphs.clear()
        self._count()
        self._findings.graphs = f"no CUDA graphs: {reason}"


def _served(module: GraphModule) -> tuple[Rows, str]:
    """What may be padded, and which calls one graph serves."""
    graph, plans = module.graph, partial(plan_in, module)
    try:
        if drawn := draws(graph):
            raise NotRowWise(drawn, "draws random numbers, and others for another number of rows")
        return row_wise(graph, plans), "one CUDA graph for each bucket of batch sizes"
    except NotRowWise as reason:
        ids = loose_ids(graph, plans)
        sizes = "set of sizes, whatever the number of ids in bags" if ids else "set of sizes"
        return Rows(ids=ids), f"one CUDA graph for each {sizes}, because rows may not be padded: {reason}"
