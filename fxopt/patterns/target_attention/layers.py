"""The layers behind the concatenation: linears, batch norms and elementwise operators, as steps of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.target_attention import plan as p
from fxopt.kernels.target_attention.plan import CONSTANT, PARAMETER, Norm, Step
from fxopt.patterns.constants import constant_of
from fxopt.patterns.target_attention.layout import Layout, Sizes, has, viewed
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import shape_of, static, tensor_of

aten = torch.ops.aten
_UNARY = {getattr(aten, name).default: getattr(p, name.upper()) for name in ("neg", "exp", "sigmoid", "tanh", "silu")}
_BINARY = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), p.ADD),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), p.SUB),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), p.MUL),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), p.DIV),
    aten.maximum.default: p.MAXIMUM,
    aten.minimum.default: p.MINIMUM,
}


@dataclass(frozen=True)
class Value:
    """A register of [B, T, channels], as the graph lays it out."""

    number: int
    layout: Layout
    channels: int


@dataclass
class Layers:
    """Turns nodes into steps, one after the other; registers are numbered anew by each step."""

    sizes: Sizes
    dtype: torch.dtype
    edited: Callable[[Node], bool]
    params: list[Node] = field(default_factory=list)
    layers: list[tuple[int, int]] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    values: dict[Node, Value] = field(default_factory=dict)

    def param(self, node: Any) -> int:
        if node is None:
            return -1
        if node not in self.params:
            self.params.append(node)
        return self.params.index(node)

    def add(self, node: Node) -> Value | None:
        """The value of a node that reads known values; None where it is nothing that a plan can say."""
        if tensor_of(node) is None or node.meta["val"].dtype != self.dtype or self.edited(node):
            return None
        source = node.args[0] if node.args else None
        value = None
        if isinstance(source, Node) and source in self.values:
            value = self._viewed(node, self.values[source]) or self._of_one(node, self.values[source])
        value = value or self._of_two(node)
        if value is not None:
            if not has(shape_of(node), value.layout, self.sizes, value.channels):
                return None
            self.values[node] = value
        return value

    def _viewed(self, node: Node, value: Value) -> Value | None:
        layout = viewed(node, value.layout, self.sizes, value.channels)
        return None if layout is None else replace(value, layout=_scores(layout, value.channels))

    def _of_one(self, node: Node, value: Value) -> Value | None:
        if node.target in _UNARY:
            return self._step(_UNARY[node.target], value, value.number)
        if node.target is aten.relu.default:
            return self._step(p.MAXIMUM, value, self._constant(0.0), value.number)
        if node.target is aten.leaky_relu.default:
            slope = node.args[1] if len(node.args) > 1 else 0.01
            return self._step(p.PRELU, value, value.number, self._constant(slope))
        if node.target is aten.square.default:
            return self._step(p.MUL, value, value.number, value.number)
        if node.target is aten.abs.default:
            negative = self._step(p.NEG, value, value.number)
            return self._step(p.MAXIMUM, value, value.number, negative.number)
        if node.target is aten.reciprocal.default:
            return self._step(p.DIV, value, self._constant(1.0), value.number)
        if node.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
            return self._clamped(node, value)
        if node.target is aten.prelu.default:
            return self._prelu(node, value)
        if node.target is aten.batch_norm.default:
            return self._normalized(node, value)
        return self._linear(node, value) if node.target is aten.linear.default else None

    def _of_two(self, node: Node) -> Value | None:
        operands: Any = node.args[:2]
        if node.target is aten.rsub.Scalar:
            operation, operands = p.SUB, operands[::-1]
        elif node.target in _BINARY:
            operation = _BINARY[node.target]
        else:
            return None
        if node.kwargs or len(node.args) != 2:
            return None
        known = [self.values[operand] for operand in operands if isinstance(operand, Node) and operand in self.values]
        if not known or any((value.layout, value.channels) != (known[0].layout, known[0].channels) for value in known):
            return None
        numbers = [self._operand(operand, known[0]) for operand in operands]
        if operation in p.BOUNDS and any(number is not None and number >= CONSTANT for number in numbers):
            return None  # at a tie eager halves the gradient, as it does not at the bound of a clamp
        return None if None in numbers else self._step(operation, known[0], *numbers)

    def _clamped(self, node: Node, value: Value) -> Value | None:
        for name, operation in (("min", p.MAXIMUM), ("max", p.MINIMUM)):
            bound: Any = arguments_of(node).get(name)
            if isinstance(bound, Node):
                return None
            if bound is not None:
                value = self._step(operation, value, value.number, self._constant(bound))
        return value

    def _prelu(self, node: Node, value: Value) -> Value | None:
        slope: Any = node.args[1]
        one = static(shape_of(slope)[0] if shape_of(slope) else 1) == 1
        if not self._is_plain(slope) or not (one or value.layout[1] == "C"):
            return None
        return self._step(p.PRELU, value, value.number, PARAMETER + self.param(slope))

    def _normalized(self, node: Node, value: Value) -> Value | None:
        _, weight, bias, mean, variance, training, _, eps, _ = node.args
        vectors = [vector for vector in (weight, bias, mean, variance) if vector is not None]
        if training or mean is None or variance is None or len(value.layout) < 2 or value.layout[1] != "C":
            return None
        if not all(self._is_plain(vector) for vector in vectors):
            return None
        numbers = [self.param(vector) for vector in (mean, variance, weight, bias)]
        self.norms.append(Norm(*numbers, eps=float(eps)))  # type: ignore[arg-type, misc]
        return self._step(p.BATCH_NORM, value, value.number, len(self.norms) - 1)

    def _linear(self, node: Node, value: Value) -> Value | None:
        weight: Any = node.args[1]
        bias = node.args[2] if len(node.args) > 2 else None
        if value.layout[-1] != "C" or not self._is_plain(weight) or len(shape_of(weight)) != 2:
            return None
        if bias is not None and not self._is_plain(bias):
            return None
        N = static(shape_of(weight)[0])
        if N is None:
            return None
        self.layers.append((self.param(weight), self.param(bias)))
        made = self._step(p.LINEAR, value, value.number, len(self.layers) - 1)
        return Value(made.number, _scores(value.layout, N), N)

    def _operand(self, operand: Any, like: Value) -> int | None:
        if isinstance(operand, Node) and operand in self.values:
            return self.values[operand].number
        number = constant_of(operand)
        if number is not None:
            return self._constant(number)
        return PARAMETER + self.param(operand) if self._is_vector(operand, like) else None

    def _is_vector(self, operand: Any, like: Value) -> bool:
        """Whether it holds one number, or one for each channel where `like` has its channels."""
        if not self._is_plain(operand):
            return False
        shape = shape_of(operand)
        long = [dim - len(shape) for dim, size in enumerate(shape) if static(size) != 1]
        if not long:
            return len(shape) <= len(like.layout)
        return len(long) == 1 and -long[0] <= len(like.layout) and like.layout[long[0]] == "C"

    def _is_plain(self, node: Any) -> bool:
        """A tensor of the same dtype that depends on none of the values, and that nobody edits."""
        if not isinstance(node, Node) or node in self.values or tensor_of(node) is None:
            return False
        return node.meta["val"].dtype == self.dtype and not self.edited(node)

    def _constant(self, number: Any) -> int:
        if float(number) not in self.constants:
            self.constants.append(float(number))
        return CONSTANT + self.constants.index(float(number))

    def _step(self, operation: int, like: Value, left: Any, right: Any = 0) -> Value:
        number = len(self.steps) + 1  # register 0 is the first layer
        self.steps.append(Step(operation, number, left, right))
        return replace(like, number=number)


def _scores(layout: Layout, channels: int) -> Layout:
    """One channel is no dim of its own."""
    return tuple("1" if label == "C" and channels == 1 else label for label in layout)


def allocated(steps: list[Step], score: int) -> tuple[tuple[Step, ...], int] | None:
    """The steps that `score` needs, in few registers; None where they do not suffice."""
    if len(steps) >= PARAMETER:
        return None
    needed, kept = {score}, []
    for step in reversed(steps):
        if step.out in needed:
            kept.append(step)
            needed |= {operand for operand in _reads(step) if operand < PARAMETER}
    kept.reverse()
    last = {operand: place for place, step in enumerate(kept) for operand in _reads(step)} | {score: len(kept)}
    place_of, free = {0: 0}, set(range(1, p.MOST_REGISTERS))
    result = []
    for place, step in enumerate(kept):
        if not free:
            return None
        out = min(free)
        numbers = {operand: place_of.get(operand, operand) for operand in (step.left, step.right)}
        right = step.right if step.op in (p.LINEAR, p.BATCH_NORM) else numbers[step.right]
        result.append(Step(step.op, out, numbers[step.left], right))
        place_of[step.out] = out
        free.discard(out)
        free |= {place_of[operand] for operand in _reads(step) if operand in place_of and last[operand] == place}
    return tuple(result), place_of[score]


def _reads(step: Step) -> tuple[int, ...]:
    if step.op in (p.LINEAR, p.BATCH_NORM) or step.op in _UNARY.values():
        return (step.left,)
    return step.left, step.right
