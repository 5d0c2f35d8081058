"""Who reads what in a captured graph: the inputs behind a value, and the calls that trust their integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fxopt.shape.calls import ancestors, arguments_of


class Reads:
    """The inputs of a graph, by number; the last placeholders are the inputs."""

    def __init__(self, graph: fx.Graph, count: int) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        self.inputs = {node: k for k, node in enumerate(placeholders[len(placeholders) - count :])}

    def behind(self, values: Sequence[object], sizes: bool = True) -> set[int]:
        """The inputs that values are computed from; without `sizes` not those of which only a size is read."""
        return {self.inputs[node] for node in ancestors(values, sizes) if node in self.inputs}


def is_of_others(node: fx.Node) -> bool:
    """Neither torch's nor Python's."""
    if node.op == "call_module":
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")


class Bags(NamedTuple):
    """One of torch's calls for jagged bags, which reads behind its ids where the offsets are wrong.

    call: the node itself.
    ends: whether the last offset is the end of the ids. Ids behind it are in no bag, and the backward crashes on them.
    """

    ids: fx.Node
    offsets: fx.Node
    ends: bool
    call: fx.Node


def bags(graph: fx.Graph) -> list[Bags]:
    """All of a graph."""
    calls = [node for node in graph.nodes if node.op == "call_function" and "embedding_bag" in str(node.target)]
    jagged = [node for node in calls if len(node.args) > 2 and isinstance(node.args[2], fx.Node)]
    ends = [bool(arguments_of(node).get("include_last_offset")) for node in jagged]
    return [Bags(node.args[1], node.args[2], end, node) for node, end in zip(jagged, ends, strict=True)]


def holds_integers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
