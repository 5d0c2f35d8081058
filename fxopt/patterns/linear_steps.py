"""What may be done to the rows of a linear layer: activations, batch norms with running statistics, layer norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mlp.plan import Op
from fxopt.patterns.gated_steps import gate_at
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import is_float32, same, shape_of, static

aten = torch.ops.aten


@dataclass(frozen=True)
class Found:
    """A step in a graph. nodes: what computes it, the last one its value."""

    op: Op
    tensors: tuple[Node | None, ...]
    constants: tuple[float, ...]
    nodes: list[Node]


def step_at(source: Node) -> Found | None:
    """What is done to `source` by its only user, or by its users together."""
    user = next(iter(source.users), None)
    if len(source.users) > 1:
        return _gated(source)
    if user is None or user.op != "call_function":
        return None
    match_user = _STEPS.get(user.target)
    if match_user is None or user.args[0] is not source:
        return None
    return match_user(user) if is_float32(source) and is_float32(user) else None


def _gated(source: Node) -> Found | None:
    """x * sigmoid(x), or Dice."""
    gate = gate_at(source)
    if gate is None or not (is_float32(source) and is_float32(gate.nodes[-1])):
        return None
    if not gate.is_dice:
        return Found(Op.SILU, (), (), gate.nodes)
    norm = _batch_norm(gate.norm) if gate.norm is not None else None
    if norm is None or gate.slopes is None or not _vectors([gate.slopes], source, or_one=True):
        return None
    return Found(Op.DICE, (*norm.tensors, gate.slopes), norm.constants, gate.nodes)


def _arguments(node: Node) -> list[Any]:
    """By their places in the schema."""
    return list(arguments_of(node).values())


def _plain(op: Op) -> Callable[[Node], Found]:
    return lambda node: Found(op, (), (), [node])


def _gelu(node: Node) -> Found | None:
    ops = {"none": Op.GELU, "tanh": Op.GELU_TANH}
    return Found(ops[_arguments(node)[1]], (), (), [node])


def _leaky_relu(node: Node) -> Found | None:
    slope = _arguments(node)[1]
    return Found(Op.LEAKY_RELU, (), (float(slope),), [node]) if isinstance(slope, int | float) else None


def _elu(node: Node) -> Found | None:
    _, alpha, scale, input_scale = _arguments(node)
    return Found(Op.ELU, (), (float(alpha),), [node]) if (scale, input_scale) == (1, 1) else None


def _softplus(node: Node) -> Found | None:
    _, beta, threshold = _arguments(node)
    return Found(Op.SOFTPLUS, (), (), [node]) if (beta, threshold) == (1, 20) else None


def _clamp(node: Node) -> Found | None:
    low, high = (arguments_of(node).get(name) for name in ("min", "max"))
    if not all(isinstance(bound, int | float | None) for bound in (low, high)):
        return None
    bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))  # type: ignore[arg-type]
    return Found(Op.CLAMP, (), bounds, [node]) if bounds[0] <= bounds[1] else None


def _hardtanh(node: Node) -> Found | None:
    _, low, high = _arguments(node)
    return Found(Op.HARDTANH, (), (float(low), float(high)), [node]) if low < high else None


def _prelu(node: Node) -> Found | None:
    """A slope for all, or one for each column; in more than two dims torch's channels are not the last one."""
    slope: Any = node.args[1]
    if not _vectors([slope], node, or_one=True):
        return None
    return (
        Found(Op.PRELU, (slope,), (), [node]) if len(shape_of(node)) == 2 or static(shape_of(slope)[0]) == 1 else None
    )


def _batch_norm(node: Node) -> Found | None:
    """With running statistics, over the columns of [B, N]."""
    _, weight, bias, mean, variance, training, _, eps, *_ = _arguments(node)
    tensors = (mean, variance, weight, bias)
    if training or mean is None or variance is None or len(shape_of(node)) != 2 or not _vectors(tensors, node):
        return None
    return Found(Op.BATCH_NORM, tensors, (float(eps),), [node])


def _layer_norm(node: Node) -> Found | None:
    _, shape, weight, bias, eps, *_ = _arguments(node)
    if len(shape) != 1 or not _vectors((weight, bias), node):
        return None
    return Found(Op.LAYER_NORM, (weight, bias), (float(eps),), [node])


def _vectors(tensors: Any, node: Node, or_one: bool = False) -> bool:
    """Whether these are absent, or dense fp32 vectors with a value for each column of `node`."""
    columns = shape_of(node)[-1]
    for tensor in tensors:
        if tensor is None:
            continue
        if not is_float32(tensor, rank=1) or not tensor.meta["val"].is_contiguous():
            return False
        (size,) = shape_of(tensor)
        if not (same(size, columns) or (or_one and static(size) == 1)):
            return False
    return True


_STEPS: dict[Any, Callable[[Node], Found | None]] = {
    **{getattr(aten, op.name.lower()).default: _plain(op) for op in (Op.RELU, Op.SIGMOID, Op.TANH, Op.SILU)},
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky_relu,
    aten.prelu.default: _prelu,
    aten.elu.default: _elu,
    aten.softplus.default: _softplus,
    aten.relu6.default: lambda node: Found(Op.HARDTANH, (), (0.0, 6.0), [node]),
    aten.hardtanh.default: _hardtanh,
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamp),
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
}
