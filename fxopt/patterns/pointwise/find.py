"""Pointwise chains that are worth a call of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fxopt.patterns.core import Match, Reject, Search, devices
from fxopt.patterns.pointwise.fused import Fused
from fxopt.patterns.pointwise.groups import Grouping
from fxopt.patterns.pointwise.operators import PRODUCTS
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.strides import Layout
from fxopt.shape.whole_inputs import needed_for

aten = torch.ops.aten
_FEWEST = {"cpu": 3, "cuda": 2}  # operators: on the CPU a call costs as much as one of torch's
# On CUDA worth a call alone: torch adds up [2048, 325, 16] along the last dim in 75 us on an H200, and reads it in 13.
# Softmax is not: the kernel that torch has for it is good. A batch norm takes two, three where rows lie apart.
_ON_CUDA = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default,
    aten.layer_norm.default, aten.log_softmax.int, aten.batch_norm.default,
}  # fmt: skip
_ALONE = {"cpu": set(), "cuda": _ON_CUDA}


def find_crosses(search: Search) -> Iterator[Match | Reject]:
    """Groups with products of a single column among them, such as a whole cross network, in front of the layers."""
    for found in _groups(search, _behind_layers(search.graph)):
        if isinstance(found, Match) and any(node.target in PRODUCTS for node in found.bound["nodes"]):
            yield found


def find_pointwise(search: Search) -> Iterator[Match | Reject]:
    """All groups."""
    yield from _groups(search, set())


def _groups(search: Search, without: set[Node]) -> Iterator[Match | Reject]:
    if search.changes_modes:
        first = next(iter(search.graph.nodes))
        yield Reject("forward switches gradients on and off; optimized where they are off", first)
        return
    for device in devices(search.inference):
        yield from _on(device, Grouping(search.graph, without, device))


def _on(device: str, grouping: Grouping) -> Iterator[Match | Reject]:
    for found in grouping.groups(_FEWEST[device], _ALONE[device]):
        if not isinstance(found, Fused):
            yield Reject(found[1], found[0])
            continue
        whole = list[Node]()
        for node in _strided(grouping, found):
            needed = needed_for(node, grouping.strides)
            if needed is None:
                yield Reject(f"the strides of '{node.name}' follow those of its arguments", node)
                break
            whole += needed
        else:
            bound = {"fused": found, "nodes": found.members, "aliases": grouping.aliases, "whole": whole}
            yield Match(found.outputs[0], bound)


def _behind_layers(graph: Graph) -> set[Node]:
    """Everything computed from the result of a matrix product with more than one column."""
    behind: set[Node] = set()
    for node in graph.nodes:
        wide = node.target in _MATRIX_PRODUCTS and any(static(size) != 1 for size in shape_of(node)[-1:])
        if wide or any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    return behind


_MATRIX_PRODUCTS = {aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default}


def _strided(grouping: Grouping, found: Fused) -> Iterator[Node]:
    """Outputs whose strides could be others than those of a contiguous tensor, and can be seen."""
    strides = grouping.strides
    for node in found.outputs:
        if strides.asked(node) is not Layout.ANY and strides.known(node) is not Layout.CONTIGUOUS:
            yield node
