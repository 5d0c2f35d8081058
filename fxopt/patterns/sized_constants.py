"""Tensors that depend on nothing but sizes: zeros, ones, arange, masks of those, literals moved and cast."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match, Reject
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.expressions import Sources, is_size
from fxopt.shape.sizes import Size, expression, same, static, tensor_of

aten = torch.ops.aten

KEPT_BYTES = 1 << 22  # of one constant, all its sizes together: 4 MiB of zeros take 0.2 ms to make, a look-up 50 ns

# Of their first argument they read sizes, dtype and device only.
_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


def find_sized_constants(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """One match per constant that something else uses. Bound: the calls that make it ("calls", in order), the size
    expressions they start from ("sizes"), and where to read those ("sources")."""
    found = _Constants(module)
    for node in found.needed():
        calls, sizes = found.origin(node)
        if found.aliases.leaves(node):
            yield Reject("it leaves the model, or is handed to a module: each call gives memory of its own", node)
        elif not sizes and node.meta["val"].untyped_storage().nbytes() > KEPT_BYTES:
            yield Reject(f"it takes more than {KEPT_BYTES >> 20} MiB to keep", node)
        elif sizes and node.meta["val"].device.type != "cpu":
            yield Reject("kept by size on the CPU only: on an accelerator another stream could read it too soon", node)
        else:
            yield Match(node, {"calls": tuple(calls), "sizes": tuple(sizes), "sources": found.sources})


class _Constants:
    """Which nodes of a graph depend on sizes alone, may be shared between calls, and can be made from the inputs."""

    def __init__(self, module: GraphModule) -> None:
        self.aliases, self.sources = Aliases(module.graph), Sources(module.graph)
        self._nodes: dict[Node, None] = {}
        for node in module.graph.nodes:
            if self._is_constant(node):
                self._nodes[node] = None

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

    def origin(self, node: Node) -> tuple[list[Node], list[sympy.Expr]]:
        """The constants behind `node`, itself last, and the size expressions that they start from."""
        behind: dict[Node, None] = {}
        sizes: dict[sympy.Expr, None] = {}
        left = [node]
        while left:
            call = left.pop()
            if call not in behind:
                behind[call] = None
                sizes.update(dict.fromkeys(self._sizes(call)))
                left.extend(argument for argument in self._operands(call) if argument in self._nodes)
        return [call for call in self._nodes if call in behind], list(sizes)

    def _is_constant(self, node: Node) -> bool:
        if node.op == "get_attr":
            return bool(node.meta.get("literal")) and not self.aliases.edited(node)
        if node.op != "call_function" or is_size(node):
            return False
        if not all(argument in self._nodes or is_size(argument) for argument in self._operands(node)):
            return False
        return (
            _is_repeatable(node)
            and not self.aliases.edited(node)
            and all(map(_is_plain, _tensors(node)))
            and all(map(self.sources.has, self._sizes(node)))
        )

    def _operands(self, node: Node) -> list[Node]:
        """What the value of a node depends on."""
        return [] if is_filled(node) else node.all_input_nodes

    def _sizes(self, node: Node) -> list[sympy.Expr]:
        sizes = node.meta["val"].shape if is_filled(node) else [n.meta["val"] for n in node.all_input_nodes if is_size(n)]
        return [expression(size) for size in sizes if static(size) is None]


def is_filled(node: Node) -> bool:
    """Whether a node holds one number in the sizes of another tensor."""
    return node.target in _LIKE and constant_of(node) is not None and order_of(node.meta["val"]) is not None


def _is_repeatable(node: Node) -> bool:
    """Whether a call with the same arguments gives the same values: not random, not uninitialized memory."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return is_pure(node) and "empty" not in node.target._opname


def _tensors(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.layout is torch.strided


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """The dims of a dense tensor, outermost first; None where its memory has gaps or overlaps."""
    left = [dim for dim, size in enumerate(tensor.shape) if static(size) != 1]
    order: list[int] = []
    expected: Size = 1
    while left:
        dim = next((dim for dim in reversed(left) if same(tensor.stride(dim), expected)), None)
        if dim is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
        expected = expected * tensor.shape[dim]
    return [dim for dim in range(tensor.dim()) if dim not in order] + order
