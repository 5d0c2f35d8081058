"""A graph of calls cut where it communicates: what lies between two such calls is a segment, a module of its own.

Segments run in the order of the hosts' Python, so the order of collectives, in backward too, is that of eager. A
boundary's result that is still on its way is waited for where the first call needs it, so a segment ends there as well.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from fxopt.runtime.sharded.division import Division
from fxopt.runtime.sharded.trace import Hosts

_READS = (getattr, operator.getitem)


def waited(value: Any) -> Any:
    """The result of a lazy awaitable (which keeps it), or the value itself."""
    wait = getattr(type(value), "_wait_async", None)
    return value if wait is None else wait(value)


def arrived(value: Any) -> Any:
    """The result of a lazy awaitable that somebody has waited for; any other value itself."""
    result = vars(value).get("_result") if hasattr(type(value), "_wait_async") else None
    return value if result is None else result


class Live(nn.Module):
    """Reads a tensor of a host at each call, whatever has replaced it."""

    def __init__(self, host: nn.Module, name: str) -> None:
        super().__init__()
        self._read = lambda: getattr(host, name)

    def forward(self) -> Any:
        return self._read()


def live_reads(hosts: Hosts, division: Division) -> dict[str, nn.Module]:
    """By path, what reads each tensor of a host that the graph uses."""
    paths = {str(node.target).rpartition(".") for node in hosts.graph.find_nodes(op="get_attr") if node.users}
    return {f"{path}.{name}".lstrip("."): Live(division.hosts[path], name) for path, _, name in paths}


class Cut:
    """The graph that calls boundaries and segments in turns.

    Args:
        hosts: what to cut.
        modules: by path, what the graph calls for a part or a boundary, or reads of a host (as a `Live`).
        results: by path of a boundary, what it returned at each of its calls.

    Attributes:
        segments: by name, in order.
        graph: calls of segments, boundaries and `Live`, and reads of attributes and items.
    """

    def __init__(self, hosts: Hosts, modules: Mapping[str, nn.Module], results: Mapping[str, list[Any]]) -> None:
        self.segments: dict[str, fx.GraphModule] = {}
        self.graph = fx.Graph()
        self._modules = modules
        self._known = dict(hosts.values)
        self._results = {path: iter(values) for path, values in results.items()}
        self._env: dict[fx.Node, fx.Node] = {}  # what is made by now, in the new graph
        self._on_the_way: set[fx.Node] = set()  # results of boundaries nobody has needed yet
        self._run: list[fx.Node] = []
        for node in hosts.graph.nodes:
            if node.users or not (node.op == "get_attr" or node.target is getattr):
                self._place(node)

    def module(self, segments: Mapping[str, nn.Module]) -> fx.GraphModule:
        """The graph as a module that calls these segments."""
        return fx.GraphModule({**self._modules, **segments}, self.graph, "Segments")

    def _place(self, node: fx.Node) -> None:
        if node.op == "output":
            self._close()
            self.graph.output(map_arg(node.args[0], self._env.__getitem__))
        elif node.op == "placeholder":
            self._env[node] = self.graph.placeholder(node.name)
        elif node.op == "get_attr":
            self._env[node] = self.graph.call_module(str(node.target))
        elif node.op == "call_module" and node.target in self._results:
            self._close()
            self._env[node] = self._copy(node)
            self._on_the_way.add(node)
            self._learn(node, next(self._results[str(node.target)], None))
        elif self._is_read(node):
            self._env[node] = self._copy(node)
        else:
            if self._on_the_way.intersection(node.all_input_nodes):
                self._close()
                self._arrive(node)
            self._run.append(node)

    def _learn(self, node: fx.Node, value: Any) -> None:
        if not isinstance(value, Tensor):
            self._known[node] = value

    def _is_read(self, node: fx.Node) -> bool:
        """Of an argument, or of a plain container that a boundary returned: no tensor is touched."""
        source = node.args[0] if node.op == "call_function" and node.target in _READS else None
        if not isinstance(source, fx.Node) or source not in self._known or len(node.all_input_nodes) > 1:
            return False
        if source in self._on_the_way and not isinstance(self._known[source], (tuple, list)):
            return False
        if node not in self._known:
            self._learn(node, node.target(self._known[source], *node.args[1:]))  # type: ignore[operator]
        if source in self._on_the_way:
            self._on_the_way.add(node)
        return True

    def _arrive(self, user: fx.Node) -> None:
        for node in self._on_the_way.intersection(user.all_input_nodes):
            self._on_the_way.remove(node)
            self._env[node] = self.graph.call_function(waited, (self._env[node],))

    def _close(self) -> None:
        """The calls since the last cut as one segment."""
        run, self._run = self._run, []
        if not run:
            return
        inside = set(run)
        inputs = list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))
        outputs = [node for node in run if any(user not in inside for user in node.users)]
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            env[node] = graph.placeholder(node.name)
        for node in run:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in outputs))
        name = f"segment{len(self.segments)}"
        self.segments[name] = fx.GraphModule(dict(self._modules), graph, "Segment")
        call = self.graph.call_module(name, tuple(self._env[node] for node in inputs))
        for index, node in enumerate(outputs):
            self._env[node] = self.graph.call_function(operator.getitem, (call, index))

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, self._env.__getitem__)
