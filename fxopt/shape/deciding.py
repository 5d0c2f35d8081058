"""Floats that decide integers: what ids are cut, rounded or searched from. One in the last bit may be another row."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxopt.facts import facts_of
from fxopt.shape.calls import arguments_of, is_pointwise
from fxopt.shape.sizes import tensor_of, tensors_in
from fxopt.shape.view_operators import CASTS, CUTS, EXPANSIONS, REGROUPS, SAME

aten = torch.ops.aten

_ROUNDS = {
    aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default, aten.round.decimals,
    aten.frac.default, aten.fmod.Scalar, aten.fmod.Tensor, aten.remainder.Scalar, aten.remainder.Tensor,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode,
    aten.bucketize.Tensor, aten.searchsorted.Tensor,
}  # fmt: skip
_HANDS_ON = {
    *REGROUPS, *CUTS, *EXPANSIONS, *SAME, operator.getitem, aten.transpose.int, aten.permute.default, aten.t.default,
    aten.cat.default, aten.stack.default,
}  # fmt: skip


class Deciding:
    """Of one graph the nodes whose floats decide integers, by themselves or through what is computed pointwise."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: set[Node] = set()
        for node in reversed(graph.nodes):
            if _is_float(node) and any(self._reaches(node, user) for user in node.users):
                self._nodes.add(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def _reaches(self, node: Node, user: Node) -> bool:
        if user.target in _ROUNDS:
            return True
        if decides := facts_of(user.target).decides:
            given: Any = arguments_of(user)
            plan = getattr(node.graph.owning_module, given["plan"].target)
            return any(given["tensors"][number] is node for number in decides(plan) if number >= 0)
        if _is_float(user):
            return user in self._nodes and (_is_elementwise(user) or user.target in _HANDS_ON)
        value = tensor_of(user)
        return value is not None and value.dtype is not torch.bool and _is_elementwise(user)


def _is_elementwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and (node.target in CASTS or is_pointwise(node.target))


def _is_float(node: Node) -> bool:
    return any(value.is_floating_point() for value in tensors_in(node))
