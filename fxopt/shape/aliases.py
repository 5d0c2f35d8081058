"""Which values share memory, and which of them are edited in place: the barrier every rewrite respects."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# Return their input itself (in eval) although their schema does not say so.
DROPOUTS = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
}


def mutates(node: Node) -> bool:
    """Whether a node writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def has_effects(node: Node) -> bool:
    """Whether a call does more than give its value: it writes, raises on a condition, or advances a random state."""
    return mutates(node) or node.is_impure() or node.target is torch.ops.aten._assert_async.default  # unknown to fx


def is_pure(node: Node) -> bool:
    """Whether a node may be moved, merged with its twin, or dropped: an operator without effects."""
    if node.op != "call_function":
        return node.op == "get_attr"
    return not (has_effects(node) or is_random(node))


class Aliases:
    """Groups of nodes that may share memory, by operator schemas."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        edited, leaving = [], []
        for node in graph.nodes:
            self._parent[node] = node
            for other in _aliased_arguments(node):
                self._parent[self._root(other)] = self._root(node)
            edited.extend(_written_arguments(node))
            if node.op in ("output", "call_module"):
                leaving.extend(node.all_input_nodes)
        self._edited = {self._root(node) for node in edited}
        self._leaving = {self._root(node) for node in leaving}

    def edited(self, node: Node) -> bool:
        """Whether this value, or one that shares its memory, is edited in place anywhere in the graph."""
        return self._root(node) in self._edited

    def leaves(self, node: Node) -> bool:
        """Whether this value, or one that shares its memory, reaches code that may edit it: returned, or handed to an
        opaque module.
        """
        return self._root(node) in self._leaving

    def _root(self, node: Node) -> Node:
        while (parent := self._parent[node]) is not node:
            self._parent[node] = self._parent[parent]
            node = parent
        return node


def _aliased_arguments(node: Node) -> list[Node]:
    if node.op != "call_function":
        return list(node.all_input_nodes) if node.op == "call_module" else []
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # getitem of a split, arithmetic on sizes
    if node.target in DROPOUTS:
        return list(node.all_input_nodes)
    return _nodes_where(node, lambda argument: argument.alias_info is not None)


def _written_arguments(node: Node) -> list[Node]:
    if not mutates(node):
        return []
    return _nodes_where(node, lambda argument: argument.alias_info is not None and argument.alias_info.is_write)


def _nodes_where(node: Node, keep) -> list[Node]:  # type: ignore[no-untyped-def]
    assert isinstance(node.target, torch._ops.OpOverload)
    found: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if not keep(argument):
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        map_arg(value, found.append)
    return found
