"""What each ATen operator is in steps: its tensor arguments, the dims of its result, and the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.pointwise.activations import ACTIVATIONS, numbers_fit
from fxopt.patterns.pointwise.products import BATCHED, is_batched
from fxopt.patterns.pointwise.reductions import (
    VARIANCES,
    batch_norm,
    channels,
    dot,
    layer_norm,
    log_softmax,
    norm,
    norm_dims,
    normalized,
    one_column,
    reduced_dims,
    reduction,
    same,
    softmax,
    variance,
    varying_dims,
)
from fxopt.patterns.pointwise.rule import Call, Rule, argument, broadcast, tensors
from fxopt.shape.calls import FILLS, WHERES

aten = torch.ops.aten
_EXACT = 1 << 23  # up to here a float tells an integer from its neighbours


def rule_of(node: Node, device: str) -> Rule | None:
    """How a node is computed in steps on a kind of device; None where it is not, or not exactly as eager does."""
    rule = BATCHED if device == "cuda" and is_batched(node) else RULES.get(node.target)
    if rule is None:
        return None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != device or value.layout is not torch.strided:
        return None
    if value.dtype not in (torch.float32, torch.bool):
        return None
    return rule if _arguments_fit(node, value.dtype) and _numbers_fit(node) else None


def is_exact(node: Node) -> bool:
    """Whether a step rounds as eager does. A product that is added to something rounds once (`fma`), a quotient is a
    product on GPUs, and torch's roots, exponentials and sums may differ in the last bit."""
    if node.target in _SCALED:
        return argument(node, 2) == 1
    if node.target is aten.pow.Tensor_Scalar:
        return argument(node, 1) in (1.0, 2.0)
    return node.target in _ROUNDED_ALIKE


def _arguments_fit(node: Node, result: torch.dtype) -> bool:
    """Whether every argument is on the device and converts to float, and back to bool, as eager computes it."""
    given = [value.meta["val"] for value in tensors(node).values()]
    if any(value.device != node.meta["val"].device for value in given):
        return False  # a number on the CPU beside tensors on a GPU
    dtypes = {value.dtype for value in given}
    integers = dtypes & {torch.uint8, torch.int32, torch.int64}
    if dtypes - integers - {torch.float32, torch.bool}:
        return False
    if result is torch.float32:
        return not (integers and node.target in _TYPED)
    if node.target in COMPARISONS:
        return not integers or torch.float32 in dtypes or _compares_exactly(node)
    return node.target in _TO_BOOL or (node.target in _LOGIC and dtypes == {torch.bool})


def _compares_exactly(node: Node) -> bool:
    """An integer with a number that a float tells from its neighbours."""
    return len(tensors(node)) == 1 and abs(argument(node, 1)) <= _EXACT


def _numbers_fit(node: Node) -> bool:
    """Whether everything but the tensors is known now, and of the kind that the rules know."""
    for position in range(len(node.target._schema.arguments)):  # type: ignore[union-attr]
        value = argument(node, position)
        if isinstance(value, Node) and not isinstance(value.meta.get("val"), torch.Tensor):
            return False
    if node.target is aten.pow.Tensor_Scalar:
        return argument(node, 1) in _EXPONENTS
    return node.target not in ACTIVATIONS or numbers_fit(node)


def _elementwise(op: str, count: int = 2) -> Rule:
    return Rule(broadcast, lambda call: call.do(op, *(call.operand(position) for position in range(count))))


def _with_alpha(op: str, flipped: bool = False) -> Rule:
    """a op alpha * b, or flipped b op alpha * a."""

    def steps(call: Call) -> int:
        a, b = call.operand(0), call.operand(1)
        first, second = (b, a) if flipped else (a, b)
        alpha = float(argument(call.node, 2))
        if alpha != 1:
            second = call.do("mul", second, alpha) if isinstance(second, int) else second * alpha
        return call.do(op, first, second)

    return Rule(broadcast, steps)


def _power(call: Call) -> int:
    x, exponent = call.values[0], float(argument(call.node, 1))
    if exponent in (2.0, 3.0, 4.0):
        square = call.do("square", x)
        return square if exponent == 2 else call.do("mul", square, x if exponent == 3 else square)
    return call.do({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "copy"}[exponent], x)


def _clamp(call: Call) -> int:
    value: int = call.values[0]
    for position, op in ((1, "clamp_min"), (2, "clamp_max")):
        if position in call.values or argument(call.node, position) is not None:
            value = call.do(op, value, call.operand(position))
    return value


def _leaky_relu(call: Call) -> int:
    return call.do("leaky_relu", call.values[0], call.operand(1))


def _masked_fill(call: Call) -> int:
    return call.do("where", call.values[1], call.operand(2), call.values[0])


def _cast(call: Call) -> int:
    """Numbers to float as they are; to bool, whether they are 0."""
    source = next(iter(tensors(call.node).values())).meta["val"].dtype
    result = call.node.meta["val"].dtype
    value = call.values[0]
    return call.do("ne", value, 0.0) if result is torch.bool and source is not torch.bool else call.do("copy", value)


def _lerp(call: Call) -> int:
    """From the start for a small weight, and back from the end for any other: a weight of 1 gives the end itself."""
    start, end, weight = call.values[0], call.values[1], call.operand(2)
    step = call.do("sub", end, start)
    if not isinstance(weight, int):
        near = abs(weight) < 0.5
        return call.do("add", start if near else end, call.do("mul", step, weight if near else weight - 1))
    small = call.do("lt", call.do("abs", weight), 0.5)
    factor = call.do("where", small, weight, call.do("sub", weight, 1.0))
    return call.do("add", call.do("where", small, start, end), call.do("mul", step, factor))


def _addcmul(op: str) -> Rule:
    def steps(call: Call) -> int:
        product = call.do(op, call.values[1], call.values[2])
        factor = float(argument(call.node, 3))
        return call.do("add", call.values[0], product if factor == 1 else call.do("mul", product, factor))

    return Rule(broadcast, steps)


_UNARY = (
    "neg", "abs", "exp", "log", "log1p", "tanh", "sigmoid", "silu", "erf", "relu", "sqrt", "rsqrt", "reciprocal",
    "square", "isnan",
)  # fmt: skip
_BINARY = ("mul", "div")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_COMBINED = ("and", "or", "xor")
COMPARISONS = {getattr(getattr(aten, name), kind) for name in _COMPARED for kind in ("Scalar", "Tensor")}
_LOGIC = {
    *(getattr(aten, f"logical_{name}").default for name in _COMBINED),
    *(getattr(aten, f"bitwise_{name}").Tensor for name in _COMBINED),
    *(getattr(aten, f"__{name}__").Tensor for name in _COMBINED),
    aten.bitwise_not.default, aten.where.self,
}  # fmt: skip
_TO_BOOL = {aten.to.dtype, aten._to_copy.default, aten.logical_not.default, aten.isnan.default}
_TYPED = {aten.where.self, aten.maximum.default, aten.minimum.default}
PRODUCTS = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.mv.default}
_SCALED = {getattr(getattr(aten, name), kind) for name in ("add", "sub", "rsub") for kind in ("Tensor", "Scalar")}
_ROUNDED_ALIKE = {
    *COMPARISONS, *_LOGIC, *_TO_BOOL, *_TYPED,
    *(getattr(aten, name).default for name in ("neg", "abs", "relu", "square", "leaky_relu", "prelu", "clamp")),
    aten.clamp_min.default, aten.clamp_max.default, *WHERES, *FILLS,
}  # fmt: skip
_EXPONENTS = (2.0, 3.0, 4.0, 0.5, -0.5, -1.0, 1.0)

RULES: dict[Any, Rule] = {
    **ACTIVATIONS,
    **{getattr(aten, name).default: _elementwise(name, 1) for name in _UNARY},
    aten.logical_not.default: Rule(broadcast, lambda call: call.do("eq", call.values[0], 0.0)),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _with_alpha("add")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _with_alpha("sub")),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _with_alpha("sub", flipped=True)),
    **{getattr(getattr(aten, name), kind): _elementwise(name) for name in _BINARY for kind in ("Tensor", "Scalar")},
    **{getattr(getattr(aten, name), kind): _elementwise(name) for name in _COMPARED for kind in ("Tensor", "Scalar")},
    **{getattr(aten, f"logical_{name}").default: _elementwise(name) for name in _COMBINED},
    **{getattr(aten, f"bitwise_{name}").Tensor: _elementwise(name) for name in _COMBINED},
    **{getattr(aten, f"__{name}__").Tensor: _elementwise(name) for name in _COMBINED},
    **{getattr(aten, name).default: _elementwise(name) for name in ("maximum", "minimum", "clamp_min", "clamp_max")},
    aten.clamp.default: Rule(broadcast, _clamp),
    aten.leaky_relu.default: Rule(broadcast, _leaky_relu),
    aten.prelu.default: Rule(channels, lambda call: call.do("prelu", call.values[0], call.values[1])),
    aten.pow.Tensor_Scalar: Rule(broadcast, _power),
    aten.bitwise_not.default: _elementwise("not", 1),
    **dict.fromkeys(WHERES, _elementwise("where", 3)),
    **dict.fromkeys(FILLS, Rule(broadcast, _masked_fill)),
    aten.addcmul.default: _addcmul("mul"),
    aten.addcdiv.default: _addcmul("div"),
    **dict.fromkeys((aten.lerp.Scalar, aten.lerp.Tensor), Rule(broadcast, _lerp)),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), Rule(broadcast, _cast)),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), reduction("sum")),
    aten.mean.dim: reduction("mean"),
    aten.amax.default: reduction("amax"),
    aten.amin.default: reduction("amin"),
    aten.linalg_vector_norm.default: Rule(norm_dims, norm, reduced_dims),
    **dict.fromkeys(VARIANCES, Rule(varying_dims, variance, reduced_dims)),
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), Rule(same, softmax, reduced_dims)),
    aten.log_softmax.int: Rule(same, log_softmax, reduced_dims),
    aten.batch_norm.default: Rule(channels, batch_norm),
    aten.layer_norm.default: Rule(normalized, layer_norm),
    **dict.fromkeys(PRODUCTS, Rule(one_column, dot)),
}  # fmt: skip
