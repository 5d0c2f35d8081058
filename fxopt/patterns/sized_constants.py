"""Tensors that depend on nothing but sizes: zeros, ones, arange, masks of those, literals moved and cast."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.recipes import Recipe, Writer, is_filled
from fxopt.shape.aliases import is_pure
from fxopt.shape.calls import closure
from fxopt.shape.expressions import Sources, is_size
from fxopt.shape.sizes import expression, static, tensor_of

KEPT_BYTES = 1 << 22  # of one constant, all its sizes together: 4 MiB of zeros take 0.2 ms to make, a look-up 50 ns


def find_sized_constants(search: Search) -> Iterator[Match | Reject]:
    """One match per constant that something else uses. Bound: its recipe ("recipe"), the nodes that hold just this
    ("nodes"), and where to read its sizes ("sources")."""
    found = _Constants(search)
    twins: dict[Any, tuple[Recipe, list[Node]]] = {}
    for node in found.needed():
        recipe = found.recipe(node)
        if found.aliases.leaves(node):
            yield Reject("it leaves the model, or is handed to a module: each call gives memory of its own", node)
        elif not recipe.sizes and node.meta["val"].untyped_storage().nbytes() > KEPT_BYTES:
            yield Reject(f"it takes more than {KEPT_BYTES >> 20} MiB to keep", node)
        elif recipe.sizes and node.meta["val"].device.type != "cpu":
            yield Reject("kept by size on the CPU only: on an accelerator another stream could read it too soon", node)
        else:
            twins.setdefault(recipe.key, (recipe, []))[1].append(node)
    for recipe, nodes in twins.values():
        yield Match(nodes[0], {"recipe": recipe, "nodes": tuple(nodes), "sources": found.sources})


class _Constants:
    """Which nodes of a graph depend on sizes alone, may be shared between calls, and can be made from the inputs."""

    def __init__(self, search: Search) -> None:
        self.aliases, self.sources = search.aliases, Sources(search.graph)
        self._nodes: dict[Node, int] = {}  # in graph order
        for node in search.graph.nodes:
            if self._is_constant(node):
                self._nodes[node] = len(self._nodes)

    def needed(self) -> list[Node]:
        """The constants that other nodes read, and those that leave: in graph order."""
        found, staying = [], set()
        for node in reversed(self._nodes):
            if not any(user not in self._nodes or user in staying for user in node.users):
                continue
            if node.op == "call_function" and tensor_of(node) is not None:
                found.append(node)
            if tensor_of(node) is None or self.aliases.leaves(node):
                staying.add(node)
        return found[::-1]

    def recipe(self, node: Node) -> Recipe:
        """How `node` is made, from the constants behind it and the size expressions that they start from."""
        behind = closure([node], lambda call: (read for read in _operands(call) if not is_size(read)))
        calls = sorted(behind, key=self._nodes.__getitem__)
        return Writer(dict.fromkeys(size for call in reversed(calls) for size in _sizes(call))).write(calls)

    def _is_constant(self, node: Node) -> bool:
        if node.op == "get_attr":
            return bool(node.meta.get("literal")) and not self.aliases.edited(node)
        if node.op != "call_function" or is_size(node):
            return False
        if not all(argument in self._nodes or is_size(argument) for argument in _operands(node)):
            return False
        return (
            _is_repeatable(node)
            and not self.aliases.edited(node)
            and all(map(_is_plain, _tensors(node)))
            and all(map(self.sources.has, _sizes(node)))
        )


def _operands(node: Node) -> list[Node]:
    """What the value of a node depends on."""
    return [] if is_filled(node) else node.all_input_nodes


def _sizes(node: Node) -> list[sympy.Expr]:
    """The expressions among them, or that its shape is made of."""
    sizes = node.meta["val"].shape if is_filled(node) else [n.meta["val"] for n in node.all_input_nodes if is_size(n)]
    return [expression(size) for size in sizes if static(size) is None]


def _is_repeatable(node: Node) -> bool:
    """Whether a call with the same arguments gives the same values: not random, not uninitialized memory."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return is_pure(node) and "empty" not in node.target.overloadpacket.__name__


def _tensors(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.layout is torch.strided
