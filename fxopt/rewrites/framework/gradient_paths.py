"""Gradients reach what they reach in eager. A parameter that has lost its way to an output has no gradient where
eager's is zeros, and an optimizer with momentum or weight decay steps on zeros and passes over nothing. A result is as
good a source: `torch.autograd.grad(loss, hidden)` and hooks ask for the gradient of one result in another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxopt.normalize.gradients import gradient_switches
from fxopt.rewrites.framework.editor import Rejected

aten = torch.ops.aten
Values = Mapping[Node, Node | None]
# What reads no more of a tensor than its form; integers and booleans have no gradients anyway.
_CUTS = {
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.rand_like.default, aten.randn_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
}  # fmt: skip


class GradientPaths:
    """Which parameters, inputs and results each node of a graph is differentiable in: a bit each."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        results: list[Node] = []
        map_arg(graph.output_node().args, results.append)
        self._n_results = len(results)
        self._own = dict[Node, int]()  # the bits that a result is the source of
        for number, result in enumerate(results):
            self._own[result] = self._own.get(result, 0) | 1 << number
        self._reached = self._with({})

    def keep(self, values: Values) -> None:
        """Raises Rejected where nodes that change for others take the last way from a source to an output with them."""
        moved = {old: new for old, new in values.items() if new is not None}
        lost = [old for old, new in moved.items() if self._of(old) & ~(self._of(new) | self._own.get(old, 0))]
        if lost:
            after, results = self._with(moved), (1 << self._n_results) - 1
            for old in lost:  # each way counts: a gradient in a result is the sum over those that go through it
                if self._of(old) & ~(self._of(moved[old]) | self._own.get(old, 0)) & results:
                    raise Rejected(f"without '{old.name}' a gradient does not pass through a result as eager's does")
            for output in self._graph.output_node().all_input_nodes:
                if self._of(output) & ~after[moved.get(output, output)]:
                    raise Rejected(f"without '{lost[0].name}' a parameter has no gradient where eager's is zeros")
            self._reached = after
        for old, new in moved.items():
            if own := self._own.pop(old, 0):
                self._own[new] = self._own.get(new, 0) | own
                self._reached[new] = self._of(new) | self._of(old)

    def reach(self, node: Node) -> bool:
        """Whether it may require gradients."""
        return bool(self._of(node))

    def _of(self, node: Node) -> int:
        found = self._reached.get(node)
        if found is None:
            found = _joined(node, [self._of(read) for read in node.all_input_nodes])
            found = self._reached[node] = found and found | self._own.get(node, 0)
        return found

    def _with(self, moved: Mapping[Node, Node]) -> dict[Node, int]:
        """For each node, where the users of old values read the new ones."""
        reached, own = dict[Node, int](), dict[Node, int]()
        for result, bits in self._own.items():
            new = moved.get(result, result)
            own[new] = own.get(new, 0) | bits
        switches, on = gradient_switches(self._graph), torch.is_grad_enabled()
        for number, node in enumerate(self._graph.nodes):
            on = switches.get(node, on)
            if node.op == "placeholder":
                found = 1 << self._n_results + number if _may_ask(node) else 0
            elif on:
                reads = [(moved.get(read, read), read) for read in node.all_input_nodes]
                found = _joined(node, [reached[new if new in reached else read] for new, read in reads])
            else:
                found = 0
            reached[node] = found and found | own.get(node, 0)
        return reached


def _joined(node: Node, reads: list[int]) -> int:
    if node.target in _CUTS or not _is_float(node):
        return 0
    found = 0
    for read in reads:
        found |= read
    return found


def _may_ask(placeholder: Node) -> bool:
    """A parameter may be frozen and thawed after the capture; what an input asks is part of its signature."""
    slot = placeholder.meta.get("state")
    asks = placeholder.meta.get("asks", False) or (slot is not None and slot.kind == "parameter")
    return asks and _is_float(placeholder)


def _is_float(node: Node) -> bool:
    """Whether it may have a gradient; of what has no value on its own nothing is known."""
    value = node.meta.get("val")
    if value is None:
        return True
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in values)
