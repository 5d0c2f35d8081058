"""Minus zero: which tensors never hold one, and which uses tell it from zero. `x + 0.0` turns it into zero.

Gradients are compared by value, where both zeros are equal.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from fxopt.shape.aliases import mutates
from fxopt.shape.sizes import tensor_of
from fxopt.shape.view_operators import CONJUGATES, VIEWS

aten = torch.ops.aten

# Sums start from +0.0 and are exact where the result is tiny: of 3040 sums of minus zeros in all layouts none is one.
_NEVER = {
    aten.sum.default, aten.sum.dim_IntList, aten.exp.default, aten.sigmoid.default, aten.softmax.int, aten.abs.default,
    aten.square.default, aten.cosh.default, aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default,
    aten.ones.default, aten.new_ones.default, aten.ones_like.default, aten.arange.default,
}  # fmt: skip
_MOVES = (VIEWS - CONJUGATES) | {
    aten.clone.default, aten.cat.default, aten.stack.default, aten.index_select.default, aten.detach.default,
    aten.repeat.default, aten.relu.default,
}  # fmt: skip
_ERASES = _NEVER | {
    aten.cos.default, aten.bucketize.Tensor, aten.isnan.default, aten.isinf.default, aten.logical_not.default,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
}  # fmt: skip
# What they make of minus zero differs from what they make of zero by the sign of a zero at most.
_PASSES = _MOVES | {
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.neg.default, aten.matmul.default,
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.linear.default, aten.einsum.default,
    aten.tensordot.default, aten.mean.default, aten.mean.dim, aten.tanh.default, aten.clamp.default,
    aten.clamp_min.default, aten.leaky_relu.default, aten.gelu.default, aten.silu.default, aten.dropout.default,
    aten.batch_norm.default, aten.layer_norm.default, aten.log_softmax.int, aten.cumsum.default,
}  # fmt: skip


class SignedZeros:
    """Where the sign of a zero is known, and where it matters, in one graph."""

    def __init__(self, graph: Graph) -> None:
        self._never: dict[Node, bool] = {}
        self._told: dict[Node, bool] = {}
        for node in graph.nodes:
            self._never[node] = self._is_never(node)
        for node in reversed(graph.nodes):
            self._told[node] = any(self._tells(user, node) for user in node.users)

    def never_minus(self, node: Node) -> bool:
        """Whether no element is minus zero, whatever the inputs."""
        return self._never[node]

    def matters(self, node: Node) -> bool:
        """Whether something may tell minus zero from zero in this tensor."""
        return self._told[node]

    def _is_never(self, node: Node) -> bool:
        value = tensor_of(node)
        if value is not None and not (value.is_floating_point() or value.is_complex()):
            return True
        target, args = node.target, node.args
        if node.op != "call_function" or target in _NEVER:
            return node.op == "call_function"
        sources = [source for source in node.all_input_nodes if tensor_of(source) is not None]
        if target in _MOVES or target is operator.getitem:
            return bool(node.all_input_nodes) and all(map(self._never.__getitem__, node.all_input_nodes))
        if target is aten.add.Tensor:
            return not node.kwargs and (len(sources) < 2 or any(map(self._never.__getitem__, sources)))
        if target is aten.sub.Tensor and isinstance(args[0], Node):
            return self._never[args[0]]
        if target is aten.mul.Tensor:
            return args[0] is args[1]
        if target is aten.to.dtype and sources:
            return not sources[0].meta["val"].is_floating_point()
        return False

    def _tells(self, user: Node, node: Node) -> bool:
        if user.op != "call_function" or mutates(user):
            return True
        if user.target is operator.getitem:
            return self._told[user]
        value = tensor_of(user)
        if user.target in _ERASES or (user.target is aten.to.dtype and not _is_float(value)):
            return False
        if user.target is aten.add.Tensor and not user.kwargs and self._others_never(user, node):
            return False
        if user.target in _PASSES or user.target is aten.to.dtype:
            return self._told[user]
        if user.target is aten.div.Tensor:
            return user.args[1] is node or self._told[user]
        if user.target is aten.where.self:
            return self._told[user]
        return not (user.target is aten.sym_size.int or user.target is aten.sym_numel.default)

    def _others_never(self, user: Node, node: Node) -> bool:
        """x + y with a y that is never minus zero: the sum is +0.0 for both zeros of x."""
        others = [argument for argument in user.args if argument is not node]
        return len(others) == 1 and (not isinstance(others[0], Node) or self._never[others[0]])


def _is_float(value: torch.Tensor | None) -> bool:
    return value is None or value.is_floating_point() or value.is_complex()
