"""What a model spends its time on: its graphs run node by node with a clock."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fxopt.report.data import Spending
from fxopt.report.kinds import KINDS, is_operator, kinds

RUNS = 7
SECONDS = 1.0  # a graph that takes long is run less often, at least twice


def spending(
    before: GraphModule, eager: float, after: GraphModule | None, optimized: float, tensors: Sequence[torch.Tensor]
) -> tuple[Spending, ...]:
    """The kinds of work that occur, in the order of `KINDS`.

    A clock around each operator costs more than some of them take, and misses the Python between them: so it gives
    the shares, and the whole call, measured without it, is split by them.

    Args:
        before: the captured graph, after: the optimized one, both ``forward(*tensors)``.
        eager, optimized: seconds of a whole call.
    """
    shares = _shares(before, tensors)
    left = _shares(after, tensors) if after is not None else None
    occurring = [kind for kind in KINDS if kind in shares or (left and kind in left)]
    return tuple(
        Spending(
            kind,
            eager * shares.get(kind, 0.0),
            shares.get(kind, 0.0),
            optimized * left.get(kind, 0.0) if left is not None else None,
        )
        for kind in occurring
    )


def _shares(module: GraphModule, tensors: Sequence[torch.Tensor]) -> Mapping[str, float]:
    """Each kind's share of the clocked time."""
    spent = _by_kind(module, tensors)
    total = sum(spent.values()) or 1.0
    return {kind: value / total for kind, value in spent.items()}


def _by_kind(module: GraphModule, tensors: Sequence[torch.Tensor]) -> Mapping[str, float]:
    """Median seconds of each kind of node."""
    kind_of, seconds = kinds(module.graph), defaultdict[str, float](float)
    for node, median in _clocked(module, tensors).items():
        seconds[kind_of[node]] += median
    return seconds


def _clocked(module: GraphModule, tensors: Sequence[torch.Tensor]) -> dict[Node, float]:
    """Median seconds of each operator and opaque submodule over several runs; the first run warms up."""
    clock = _Clock(module)
    clock.run(*tensors)
    clock.seconds.clear()
    deadline = time.perf_counter() + SECONDS
    for run in range(RUNS):
        if run >= 2 and time.perf_counter() > deadline:
            break
        clock.run(*tensors)
    return {node: statistics.median(times) for node, times in clock.seconds.items()}


class _Clock(Interpreter):
    """Times each node that eager would launch, without the interpreter's own work."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seconds: defaultdict[Node, list[float]] = defaultdict(list)

    def run_node(self, n: Node) -> Any:
        if not (is_operator(n) or n.op == "call_module"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = n.target if n.op == "call_function" else self.fetch_attr(str(n.target))
        start = time.perf_counter()
        result = call(*args, **kwargs)  # type: ignore[operator]
        self.seconds[n].append(time.perf_counter() - start)
        return result
