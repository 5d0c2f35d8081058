"""The attributes that a forward assigns (capture/effects.py), around a replay, which runs no Python.

What is stored leaves the graph as further results, and is stored behind each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from fxopt.rewrites.framework.direct import copied
from fxopt.runtime.capturable import NoGraph
from fxopt.runtime.executable import Executable

if TYPE_CHECKING:
    from fxopt.capture.effects import StoreAttribute

Read = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]  # one value, from results, state and inputs


class Stores:
    """An executable without its stores, and what they do with its results.

    Attributes:
        executable: its graph returns what is stored behind the results; its `run` is still the one that stores.

    Raises:
        NoGraph: a store replaces a buffer that the graph reads, which moves at each call.
    """

    def __init__(self, executable: Executable) -> None:
        module = executable.graph
        assert module is not None
        self.executable = executable
        self._calls: list[tuple[StoreAttribute, list[Read]]] = []
        if not (found := _found_in(module)):
            return
        placeholders, n_state = module.graph.find_nodes(op="placeholder"), len(executable.capture.state)
        state, inputs = placeholders[:n_state], placeholders[n_state:]
        values: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._count = len(values)
        for node, store in found.items():
            if store.asked:
                raise NoGraph(f"it replaces {store.name!r} at each call, a buffer that it reads")
            self._calls.append((store, [_read(argument, values, state, inputs) for argument in node.args]))
        self.executable = replace(executable, graph=copied(module, found, values))

    def put(self, results: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """Store what a call gave; the model's own results are left."""
        if not self._calls:
            return results
        for store, reads in self._calls:
            store(*(read(results, state, inputs) for read in reads))
        return results[: self._count]


def _found_in(module: GraphModule) -> dict[Node, StoreAttribute]:
    from fxopt.capture.effects import StoreAttribute  # the capture has paid for this import

    calls = {node: module.get_submodule(str(node.target)) for node in module.graph.find_nodes(op="call_module")}
    return {node: child for node, child in calls.items() if isinstance(child, StoreAttribute)}


def _read(argument: Any, values: list[Any], state: list[Node], inputs: list[Node]) -> Read:
    """Where the value of an argument comes from. What is computed and is no result yet becomes one."""
    if not isinstance(argument, Node):
        return lambda *_: argument
    for part, nodes in enumerate((values, state, inputs)):
        if argument in nodes:
            return Place(part, nodes.index(argument))
    values.append(argument)
    return Place(0, len(values) - 1)


@dataclass(frozen=True)
class Place:
    """A value that a call has at hand: its number in one of several sequences."""

    part: int
    number: int

    def __call__(self, *parts: Sequence[Any]) -> Any:
        return parts[self.part][self.number]
