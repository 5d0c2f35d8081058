"""Gradients reach what they reach in eager. A parameter that has lost its way to an output has no gradient where
eager's is zeros, and an optimizer with momentum or weight decay steps on zeros and passes over nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from fxopt.normalize.gradients import BARRIER, is_float, modes
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
    """Which parameters, inputs, held results and opaque modules each node of a graph is differentiable in: a bit each.

    An opaque module may have parameters that the graph does not see.

    Args:
        surely: of the inputs only those count that asked in the capture.
    """

    def __init__(self, graph: Graph, surely: bool = False) -> None:
        self._graph, self._surely = graph, surely
        self._bits: dict[Node, int] = {}
        self._reached = self._with({})

    def keep(self, values: Values) -> None:
        """Raises Rejected where nodes that change for others take the last way from a source to an output with them."""
        lost = [old for old, new in values.items() if new is not None and self._of(old) & ~self._of(new)]
        if not lost:
            return
        after = self._with(values)
        for output in self._graph.output_node().all_input_nodes:
            if self._of(output) & ~after[values.get(output) or output]:
                raise Rejected(f"without '{lost[0].name}' a parameter has no gradient where eager's is zeros")
        self._reached = after

    def reach(self, node: Node) -> bool:
        """Whether it may require gradients."""
        return bool(self._of(node))

    def _of(self, node: Node) -> int:
        found = self._reached.get(node)
        if found is None:
            found = self._reached[node] = _joined(node, [self._of(read) for read in node.all_input_nodes])
        return found

    def _with(self, values: Values) -> dict[Node, int]:
        """For each node, where the users of old values read the new ones."""
        reached = dict[Node, int]()
        recorded = modes(self._graph)
        for node in self._graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                reached[node] = self._bit(node) if _may_ask(node, self._surely) else 0
            elif recorded[node]:
                new = (values.get(read) for read in node.all_input_nodes)
                reads = zip(node.all_input_nodes, new, strict=True)
                found = _joined(node, [reached[n if n in reached else read] for read, n in reads])  # type: ignore[index]
                is_source = node.op == "call_module" or (found and node.target is BARRIER)
                reached[node] = found | self._bit(node) if is_source else found
            else:
                reached[node] = 0
        return reached

    def _bit(self, node: Node) -> int:
        return self._bits.setdefault(node, 1 << len(self._bits))


def _joined(node: Node, reads: list[int]) -> int:
    if node.target in _CUTS or not is_float(node):
        return 0
    found = 0
    for read in reads:
        found |= read
    return found


def may_ask_later(graph: Graph) -> bool:
    """Whether an input may ask for a gradient that did not in the capture."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if "state" not in node.meta)
    return any(is_float(node) and not node.meta.get("asks", False) for node in inputs)


def _may_ask(leaf: Node, surely: bool) -> bool:
    """A parameter may be frozen and thawed after the capture, and an input may ask at one call and not at another."""
    if leaf.op == "get_attr":
        return bool(getattr(leaf.graph.owning_module, str(leaf.target)).requires_grad)
    slot = leaf.meta.get("state")
    asks = (not surely or leaf.meta.get("asks", False)) if slot is None else slot.kind == "parameter"
    return asks and is_float(leaf)
