"""The sizes that a program takes: those that its graph was captured for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim as Hint

from fxopt.capture import Capture
from fxopt.capture.guards import Guards
from fxopt.capture.inputs import Dim
from fxopt.capture.numbered import symbols_as_numbers
from fxopt.runtime import Executable
from fxopt.torch_internals.symbols import traced_sizes
from fxopt.verify.check import Comparison
from fxopt.verify.resized import resized
from fxopt.verify.trial import Setting

Sizes = tuple[int, ...]
_NOT_ONE = re.compile(r"\w+ != 1")
_SQUEEZES = frozenset(getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims"))


def dynamic_dims(capture: Capture) -> list[dict[int, object]]:
    """For each tensor input its dims that may have other sizes; what must hold of them is traced with the graph."""
    static, numbers = {dim for dim, _ in capture.guards.static}, _numbers(capture)
    return [
        {
            d: Hint.AUTO if (number, d) in numbers else Hint.DYNAMIC
            for d, size in enumerate(spec.dims)
            if isinstance(size, str) and (number, d) not in static
        }
        for number, spec in enumerate(capture.inputs)
    ]


def _numbers(capture: Capture) -> set[Dim]:
    """Dims of which a call takes a number, as `math.sqrt(x.shape[1])` does, and those equal to them: torch.export fixes
    them, which a capture does not."""
    names = {str(symbol) for node in capture.graph.graph.nodes for symbol in symbols_as_numbers(node)}
    found = {(i, d) for i, spec in enumerate(capture.inputs) for d, name in enumerate(spec.dims) if name in names}
    return found.union(*(group for group in capture.guards.equal if not found.isdisjoint(group)))


def sample_sizes(capture: Capture, example: Sequence[Sizes]) -> list[Sizes]:
    """Sizes to trace with: those of the capture's own trace, which are no special ones, where they are allowed."""
    places = capture.graph.graph.find_nodes(op="placeholder")[len(capture.state) :]
    numbers = _numbers(capture)
    traced = [
        tuple(example[i][d] if (i, d) in numbers else size for d, size in enumerate(sizes))
        for i, sizes in enumerate(traced_sizes(node.meta["val"].shape, unknown=0) for node in places)
    ]
    return traced if _of_sizes(capture).holds([_Sized(sizes) for sizes in traced]) else list(example)


def _of_sizes(capture: Capture) -> Guards:
    """Kernels read inputs however they lie; a program's results are contiguous where those of the example are."""
    return replace(capture.guards, whole=(), torn=())


class _Sized:
    """What a guard reads of a tensor."""

    def __init__(self, shape: Sizes) -> None:
        self.shape = shape


def guards_of(model: nn.Module, executable: Executable, inputs: Sequence[Tensor]) -> Guards:
    """What a program must demand of sizes: what the capture does, less that they are not 1 where that is not needed.

    A squeeze of a batch gives another rank at batch 1, so a capture for larger batches excludes it. Where the rewritten
    graph has no such squeeze, and computes what eager does also of one row of the example, it is for batch 1 as well.
    """
    capture, graph, guards = executable.capture, executable.graph, _of_sizes(executable.capture)
    relations = tuple(text for text in guards.relations if not _NOT_ONE.fullmatch(text))
    wider = replace(guards, relations=relations)
    if wider == guards or graph is None or any(map(_squeezes_rows, graph.graph.nodes)):
        return guards
    row = resized(capture.graph, capture.state_of(model), inputs, 1)
    if row is None or not wider.holds(row):
        return guards
    compared = Comparison("at batch 1: ", capture, model, Setting(capture, row, gradients=False), None)
    alone = Executable(capture, graph.forward)
    return wider if compared.eager.error is None and compared.verdict(alone).ok else guards


def _squeezes_rows(node: fx.Node) -> bool:
    if node.target not in _SQUEEZES:
        return False
    source, *dims = cast("tuple[Any, ...]", node.args)
    value = source.meta["val"]
    chosen = range(value.ndim) if not dims else [dims[0]] if isinstance(dims[0], int) else dims[0]
    return any(not isinstance(value.shape[d], int) for d in chosen if value.ndim)
