"""What each operator of a graph takes, moves and computes: the graph runs node by node with a clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fxopt.report.kinds import is_lookup, name_of, runs
from fxopt.shape.aliases import is_view
from fxopt.tune.clock import once

RUNS = 7
SECONDS = 1.0  # a graph that takes long is run less often, at least twice


@dataclass
class OwnTimes:
    """By node: the least seconds of several runs, the bytes that it reads and writes at least, its products and sums.

    The nodes inside of a function that runs rows in chunks stand for it, and share its time as they do when they run
    one by one. `rows`: of `bytes`, those of the rows that lookups read.
    """

    seconds: dict[Node, float] = field(default_factory=dict)
    bytes: dict[Node, int] = field(default_factory=dict)
    rows: dict[Node, int] = field(default_factory=dict)
    operations: dict[Node, int] = field(default_factory=dict)

    @property
    def work(self) -> dict[str, float]:
        """By name, seconds of a machine of 100 GFLOP/s and 10 GB/s: what is more work, on any."""
        return {n.name: self.operations.get(n, 0) / 1e11 + self.bytes.get(n, 0) / 1e10 for n in self.seconds}


def own_times(module: GraphModule, inputs: Sequence[Any], call: Callable[[], Any], whole: float) -> OwnTimes:
    """The least of several runs of ``module(*inputs)``, as other work only adds; the first run warms up and counts.

    Args:
        call, whole: what the graph is part of, and the seconds that it took. It runs in turns with the graph, and the
            times are scaled by what it takes now: other work on the machine comes and goes.
    """
    clock = _Clock(module)
    clock.waits = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    clock.run(*inputs)
    clock.counts = False
    clock.laps.clear()
    deadline = time.perf_counter() + SECONDS
    wholes: list[float] = []
    while len(wholes) < 2 or (len(wholes) < RUNS and time.perf_counter() < deadline):
        clock.run(*inputs)
        call()
        wholes.append(once(call))
    found, pace = clock.found, whole / min(wholes)
    for node, laps in clock.laps.items():
        _put(found, node, pace * min(laps), clock.inner.get(node))
    return found


def _put(found: OwnTimes, node: Node, seconds: float, inner: OwnTimes | None) -> None:
    if inner is None or not (whole := sum(inner.seconds.values())):
        found.seconds[node] = seconds
        return
    for inside, own in inner.seconds.items():
        found.seconds[inside] = seconds * own / whole
    for mine, theirs in ((found.bytes, inner.bytes), (found.rows, inner.rows), (found.operations, inner.operations)):
        mine.update(theirs)
        mine.pop(node, None)


class _Clock(Interpreter):
    """Times each node that eager would launch, by the way in which the optimized model calls it."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.laps: defaultdict[Node, list[float]] = defaultdict(list)
        self.found = OwnTimes()
        self.inner: dict[Node, OwnTimes] = {}
        self.counts = True
        self.waits = False  # for a GPU

    def run_node(self, n: Node) -> Any:
        if not runs(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = n.meta.get("bound", n.target) if n.op == "call_function" else self.fetch_attr(str(n.target))
        if self.counts:
            if "inner" in n.meta:
                inside = GraphModule(torch.nn.Module(), n.meta["inner"])
                self.inner[n] = own_times(inside, args, lambda: call(*args, **kwargs), 1.0)
            result = call(*args, **kwargs)
            self._count(n, args, kwargs, result)
            return result
        start = time.perf_counter()
        result = call(*args, **kwargs)
        if self.waits:
            torch.cuda.synchronize()
        self.laps[n].append(time.perf_counter() - start)
        return result

    def _count(self, node: Node, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
        self.found.operations[node] = _operations(node, args, kwargs, result)
        if is_view(node):
            return
        tables = _tables(node)
        read = (value for argument, value in zip(node.args, args, strict=True) if argument not in tables)
        moved = _bytes(read) + _bytes(kwargs.values()) + _bytes([result])
        if is_lookup(node):
            self.found.rows[node] = _bytes_of_rows(node, args, result)
            moved += self.found.rows[node]
        self.found.bytes[node] = moved


def _tables(node: Node) -> list[object]:
    """The arguments of a lookup of which it reads some rows alone."""
    if not is_lookup(node):
        return []
    return [argument for argument in node.args if _reads_state(argument)]


def _reads_state(argument: object) -> bool:
    nodes = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Node)]
    return bool(nodes) and all("state" in node.meta for node in nodes)


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))


def _bytes_of_rows(node: Node, args: tuple, result: Any) -> int:
    """Of a lookup of torch: a row for each id. 0 for ours, whose rows the captured lookups tell."""
    if "bag" in name_of(node):
        table, ids = args[:2]
        return ids.numel() * table.shape[-1] * table.element_size()
    return _bytes([result]) if isinstance(result, Tensor) and not node.meta.get("origins") else 0


def _operations(node: Node, args: tuple, kwargs: Mapping[str, Any], result: Any) -> int:
    """Products and sums, as torch.utils.flop_counter counts them; 0 where it does not."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None and name_of(node) == "linear":  # it counts what linear is made of
        x, weight = args[:2]
        return 2 * x.numel() * weight.shape[0]
    try:
        return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    except (AssertionError, RuntimeError, TypeError, ValueError):  # a form of the call that it does not know
        return 0


def rates(device: torch.device) -> tuple[float, float]:
    """(bytes, operations) a second: of a copy of 64 MiB, and of a product of two fp32 matrices."""
    source = torch.ones(1 << 24, device=device)
    copy, square = torch.empty_like(source), torch.ones(1024, 1024, device=device)
    moving = min(once(lambda: copy.copy_(source)) for _ in range(5))
    working = min(once(lambda: square @ square) for _ in range(5))
    return 2 * source.numel() * source.element_size() / moving, 2 * 1024**3 / working


def credit(after: OwnTimes, before: OwnTimes) -> None:
    """Gives calls of ours, which no counter knows, the operations and the rows of what they replaced.

    Where several calls replaced it together, the slowest has them.
    """
    operations = {node.name: count for node, count in before.operations.items()}
    rows = {node.name: count for node, count in before.rows.items()}
    groups: dict[int, list[Node]] = {}
    for node in after.seconds:
        if origins := node.meta.get("origins"):
            groups.setdefault(id(origins), []).append(node)
    for nodes in groups.values():
        slowest, origins = max(nodes, key=after.seconds.__getitem__), nodes[0].meta["origins"]
        if not any(after.operations.get(node) for node in nodes):
            after.operations[slowest] = sum(operations.get(name, 0) for name in origins)
        if is_lookup(slowest):
            after.bytes[slowest] = after.bytes.get(slowest, 0) + sum(rows.get(name, 0) for name in origins)
