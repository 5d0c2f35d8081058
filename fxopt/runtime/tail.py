"""The last product of a call, behind a replay where its result is far larger than what it is made of.

A replay copies its outputs to memory of the caller's own. The scores of 50,000 items for 2,048 users are 410 MB: their
copy takes 570 us on an H100, as long as all else. The product of users and items writes them once, where they stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.facts import facts_of
from fxopt.rewrites.framework.direct import as_function, copied
from fxopt.rewrites.framework.regions import Region
from fxopt.runtime.executable import Executable
from fxopt.runtime.stores import Place
from fxopt.shape.aliases import has_effects, is_random
from fxopt.torch_internals.storage import storage_number
from fxopt.torch_internals.symbols import traced_sizes

_LARGE = 1 << 23  # bytes of all results; on an H100 a call with 50,000 scores of one user takes 56 us, with a tail 95
_LARGE_ROW = 1 << 12  # bytes, of a result that may become large
_FEWER, _MOST = 8, 4  # times the bytes that it reads besides state; operators


@dataclass(frozen=True)
class _Call:
    """Operators behind a replay, the last one's value a result. places: of what they read, in results and state."""

    function: Callable[..., Sequence[Tensor]]
    places: list[Place]

    def __call__(self, *parts: Sequence[Any]) -> Tensor:
        (value,) = self.function(*[place(*parts) for place in self.places])
        return value


class Tail:
    """An executable without its last products, and what computes them.

    Attributes:
        executable: its graph returns what they read instead of them; its `run` is still the whole call.
    """

    def __init__(self, executable: Executable) -> None:
        module = executable.graph
        assert module is not None
        self.executable, self._graph = executable, module.graph
        self._results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._state = module.graph.find_nodes(op="placeholder")[: len(executable.capture.state)]
        self._memory = {storage_number(n.meta["val"]) for n in self._state if isinstance(n.meta.get("val"), Tensor)}
        self._calls: list[_Call | Place] = []
        parts = {node: part for node in self._results if (part := self._part(node)) is not None}
        if not parts:
            return
        kept = [node for node in self._results if node not in parts]
        read = [n for part in parts.values() for n in part.reads if n not in self._state]
        returned = [*kept, *dict.fromkeys(n for n in read if n not in kept)]
        gone = sorted((node for part in parts.values() for node in part.inside), reverse=True)
        self.executable = replace(executable, graph=copied(module, gone, returned))
        self._calls = [self._call(parts[n], returned) if n in parts else Place(0, kept.index(n)) for n in self._results]

    def put(self, results: Sequence[Any], state: Sequence[Any]) -> Sequence[Any]:
        """All results of a call, from what a replay gave."""
        return [call(results, state) for call in self._calls] if self._calls else results

    def _call(self, part: Region, returned: list[Any]) -> _Call:
        places = [
            Place(1, self._state.index(n)) if n in self._state else Place(0, returned.index(n)) for n in part.reads
        ]
        return _Call(as_function(part.graph(part.reads), inference=True), places)

    def _part(self, result: Any) -> Region | None:
        if not isinstance(result, Node) or self._results.count(result) > 1 or _row(result) < _LARGE_ROW:
            return None
        nodes, output = [result], self._graph.output_node()
        while len(nodes) <= _MOST and all(map(_is_movable, nodes)):
            part = Region(sorted(nodes), [result])
            if set(result.users) != {output} or any(not set(node.users) <= {*nodes} for node in nodes[:-1]):
                return None
            more = [
                n for n in part.reads if n not in self._state and (_row(n) * _FEWER > _row(result) or self._is_state(n))
            ]
            if not more:
                return part if self._are_apart(part.reads) else None
            nodes = [*more, *nodes]
        return None

    def _is_state(self, node: Node) -> bool:
        """Whether it is a view of state."""
        value = node.meta.get("val")
        return isinstance(value, Tensor) and storage_number(value) in self._memory

    def _are_apart(self, sources: Sequence[Node]) -> bool:
        """Whether a graph can return these: they share no memory with what it is given or returns besides."""
        graph = self._graph
        others = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"), *self._results]
        taken = {storage_number(n.meta["val"]) for n in others if isinstance(n.meta.get("val"), Tensor)}
        read = [storage_number(n.meta["val"]) for n in sources if n not in (*self._state, *self._results)]
        return not all(n in self._state for n in sources) and len(read) == len({*read} - taken)


def is_large(results: Sequence[Tensor]) -> bool:
    """Whether to copy the results of a call takes longer than one more launch."""
    return sum(x.numel() * x.itemsize for x in results) >= _LARGE


def _is_movable(node: Node) -> bool:
    """Whether a call computes one tensor from tensors and numbers, and nothing else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not _row(node):
        return False
    facts = facts_of(node.target)
    return not (has_effects(node) or is_random(node) or facts.keeps or facts.clamps) and all(
        isinstance(source.meta.get("val"), Tensor) for source in node.all_input_nodes
    )


def _row(node: Node) -> int:
    """Bytes of one row, at the sizes that were captured; 0 of what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return math.prod(traced_sizes(value.shape[1:], unknown=1)) * value.element_size()
