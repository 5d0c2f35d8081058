"""Activations in the steps that there are, with torch's values and gradients also where their pieces meet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.pointwise.plan import Operand
from fxopt.patterns.pointwise.rule import Call, Rule, argument, broadcast

aten = torch.ops.aten
_LARGEST = torch.finfo(torch.float32).max
_KAPPA = 0.044715  # GELU's cubic term


def _elu(call: Call) -> int:
    """expm1(x) = 2 t / (1 - t) with t = tanh(x / 2) keeps its digits near 0, where exp(x) - 1 has none; below -1 it is
    that, whose gradient keeps its own."""
    x, (alpha, scale, inner) = call.values[0], _numbers_of_elu(call.node)
    below = call.do("clamp_max", x, 0.0)  # so that a gradient that is not wanted is a number
    power = below if inner == 1 else call.do("mul", below, inner)
    t = call.do("tanh", call.do("mul", power, 0.5))
    near = call.do("div", call.do("mul", t, 2.0), call.do("sub", 1.0, t))
    powers = call.do("where", call.do("lt", power, -1.0), call.do("sub", call.do("exp", power), 1.0), near)
    negative = call.do("mul", powers, alpha * scale)
    return call.do("where", call.do("le", x, 0.0), negative, x if scale == 1 else call.do("mul", x, scale))


def _numbers_of_elu(node: Node) -> tuple[float, float, float]:
    if node.target is aten.selu.default:
        return 1.6732632423543772, 1.0507009873554805, 1.0
    alpha = float(argument(node, 1))
    if node.target is aten.celu.default:
        return alpha, 1.0, 1 / alpha
    return alpha, float(argument(node, 2)), float(argument(node, 3))


def _mish(call: Call) -> int:
    return call.do("mul", call.values[0], call.do("tanh", call.do("softplus", call.values[0])))


def _softplus(call: Call) -> int:
    beta = float(argument(call.node, 1))
    if beta == 1:
        return call.do("softplus", call.values[0])
    product = call.do("mul", call.values[0], beta)
    soft = call.do("div", call.do("softplus", call.do("clamp_max", product, 20.0)), beta)
    return call.do("where", call.do("gt", product, 20.0), call.values[0], soft)


def _log_sigmoid(call: Call) -> int:
    return call.do("neg", call.do("softplus", call.do("neg", call.values[0])))


def _between(call: Call, low: float, high: float, ends: tuple[Operand, Operand], inside: int) -> int:
    """`inside` between two bounds, and `ends` from them on, where `inside` has no gradient. NaN is inside."""
    x = call.values[0]
    upper = call.do("where", call.do("ge", x, high), ends[1], inside)
    return call.do("where", call.do("le", x, low), ends[0], upper)


def _hardtanh(call: Call) -> int:
    if call.node.target is aten.relu6.default:
        ends = (0.0, 6.0)
    else:
        ends = (float(argument(call.node, 1)), float(argument(call.node, 2)))
    return _between(call, *ends, ends, call.values[0])


def _hardsigmoid(call: Call) -> int:
    above = call.do("clamp_min", call.do("add", call.values[0], 3.0), 0.0)  # so that NaN has a gradient of 0
    return _between(call, -3.0, 3.0, (0.0, 1.0), call.do("div", above, 6.0))


def _hardswish(call: Call) -> int:
    x = call.values[0]
    near = call.do("clamp_max", call.do("clamp_min", x, -3.0), 3.0)  # so that a gradient that is not wanted is a number
    inside = call.do("div", call.do("mul", near, call.do("add", near, 3.0)), 6.0)
    upper = call.do("where", call.do("lt", x, 3.0), inside, x)  # NaN is x, as in torch's scalar loop
    return call.do("where", call.do("le", x, -3.0), call.do("mul", x, 0.0), upper)  # of -inf torch gives NaN, too


def _threshold(call: Call) -> int:
    x, value = call.values[0], float(argument(call.node, 2))
    return call.do("where", call.do("le", x, float(argument(call.node, 1))), value, x)


def _gelu(call: Call) -> int:
    x = call.values[0]
    if argument(call.node, 1) == "none":
        return call.do("gelu", x)
    cubed = call.do("mul", call.do("mul", call.do("mul", x, x), x), _KAPPA)
    t = call.do("tanh", call.do("mul", call.do("add", x, cubed), math.sqrt(2 / math.pi)))
    return call.do("mul", call.do("mul", x, 0.5), call.do("add", t, 1.0))


def _nan_to_num(call: Call) -> int:
    x = call.values[0]
    finite = call.do("clamp_max", call.do("clamp_min", x, -_LARGEST), _LARGEST)
    return call.do("where", call.do("isnan", x), float(argument(call.node, 1) or 0.0), finite)


ACTIVATIONS: dict[Any, Rule] = {
    **dict.fromkeys((aten.elu.default, aten.celu.default, aten.selu.default), Rule(broadcast, _elu)),
    aten.mish.default: Rule(broadcast, _mish),
    aten.softplus.default: Rule(broadcast, _softplus),
    aten.log_sigmoid.default: Rule(broadcast, _log_sigmoid),
    **dict.fromkeys((aten.hardtanh.default, aten.relu6.default), Rule(broadcast, _hardtanh)),
    aten.hardsigmoid.default: Rule(broadcast, _hardsigmoid),
    aten.hardswish.default: Rule(broadcast, _hardswish),
    aten.threshold.default: Rule(broadcast, _threshold),
    aten.gelu.default: Rule(broadcast, _gelu),
    aten.nan_to_num.default: Rule(broadcast, _nan_to_num),
}


def numbers_fit(node: Node) -> bool:
    """Whether an activation's numbers are those that its steps are for."""
    if node.target is aten.softplus.default:
        return argument(node, 1) > 0 and argument(node, 2) == 20
    if node.target is aten.nan_to_num.default:
        return argument(node, 2) is None and argument(node, 3) is None
    if node.target in (aten.elu.default, aten.celu.default):
        return all(argument(node, position) > 0 for position in range(1, len(node.target._schema.arguments)))  # type: ignore[union-attr]
    if node.target is aten.hardtanh.default:
        return argument(node, 1) < argument(node, 2)
    return True
