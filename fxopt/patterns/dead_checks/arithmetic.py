"""Arithmetic that changes nothing, because its operand already has the values that it would give."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch.fx import Node

from fxopt.patterns.constants import Number
from fxopt.patterns.core import Reject
from fxopt.patterns.dead_checks.proofs import (
    Checks,
    Dead,
    Handler,
    Verdict,
    either_side,
    from_integers,
    is_integer,
    told_call,
    uncast,
)
from fxopt.shape.calls import arguments_of
from fxopt.shape.ranges.values import Values
from fxopt.shape.sizes import is_tensor, tensor_of

aten = torch.ops.aten
_ROUNDINGS = {aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default, aten.fix.default}


def _compares(dtype: torch.dtype, bound: object) -> bool:
    """Whether torch compares tensors of `dtype` with this bound itself, not with a rounded or wrapped one."""
    if isinstance(bound, Node):
        tensor = tensor_of(bound)
        return tensor is not None and tensor.dtype == dtype
    return isinstance(bound, int | float) and _holds(dtype, bound)


@cache
def _holds(dtype: torch.dtype, number: Number) -> bool:
    """Whether a tensor of `dtype` can hold just this number."""
    if not dtype.is_floating_point and (isinstance(number, float) or dtype == torch.bool):
        return False
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
    return torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item() == number


def _bounded(checks: Checks, node: Node, kept: str, low: object, high: object, strict: bool = False) -> Dead | None:
    """min(max(x, low), high) of an x that lies between. A float zero equal to a bound may change its sign.

    strict: also where x equals a bound its gradient is not all x's.
    """
    arguments = arguments_of(node)
    x = arguments[kept]
    if not is_tensor(x):
        return None
    values, dtype = checks.values(x), x.meta["val"].dtype
    if values.nan or not values.intervals:
        return None
    for bound, is_low in ((low, True), (high, False)):
        if bound is None:
            continue
        if not _compares(dtype, bound):
            return None
        limits = checks.values(bound)
        if limits.nan or not limits.intervals:
            return None
        if not (limits.max <= values.min if is_low else values.max <= limits.min):
            return None
        touches_zero = dtype.is_floating_point and 0 in values and 0 in limits
        if touches_zero and not (from_integers(x) and isinstance(bound, int | float) and math.copysign(1, bound) > 0):
            return None
    tensors = isinstance(low, Node) or isinstance(high, Node)
    return checks.pass_on(node, kept, checks.proof(x), float_gradient=not (tensors or strict))


def _clamp(checks: Checks, node: Node) -> Verdict:
    arguments = arguments_of(node)
    x = arguments["self"]
    dead = _bounded(checks, node, "self", arguments.get("min"), arguments.get("max"))
    if dead is not None or not is_integer(x) or not is_integer(node):
        return dead
    edited = "; they are edited in place" if checks.aliases.edited(x) or checks.aliases.edited(node) else ""
    return Reject(f"{told_call(node)} stays: {checks.proof(x)}{edited}", node)


@either_side
def _maximum(checks: Checks, node: Node, kept: str, limit: object) -> Dead | None:
    return _bounded(checks, node, kept, limit, None, strict=True)


@either_side
def _minimum(checks: Checks, node: Node, kept: str, limit: object) -> Dead | None:
    return _bounded(checks, node, kept, None, limit, strict=True)


def _positive(checks: Checks, node: Node) -> Verdict:
    """relu and abs."""
    return _bounded(checks, node, "self", 0, None, strict=True)


def _reduced(to: Callable[[int], Values]) -> Handler:
    """Of integers that are reduced already. to: what a divisor leaves of them."""

    def handle(checks: Checks, node: Node) -> Verdict:
        x, d = node.args[0], checks.constant(arguments_of(node)["other"])
        if not is_integer(x) or not isinstance(d, int) or d == 0 or not _holds(node.meta["val"].dtype, d):
            return None
        return checks.pass_on(node, "self", checks.proof(x)) if checks.values(x).within(to(d)) else None

    return handle


def _signed_as_divisor(d: int) -> Values:
    return Values.between(min(0, d + 1), max(0, d - 1))


def _signed_as_before(d: int) -> Values:
    return Values.between(1 - abs(d), abs(d) - 1)


def _rounding(checks: Checks, node: Node) -> Verdict:
    x = node.args[0]
    if not is_tensor(x):
        return None
    if not node.meta["val"].is_floating_point():
        return checks.pass_on(node, "self", "integers are whole numbers")
    return checks.pass_on(node, "self", "its values are whole numbers already") if _is_whole(x) else None


def _is_whole(node: Node) -> bool:
    """Floats that are whole numbers (or infinite, or NaN)."""
    while node.meta["val"].is_floating_point():
        if node.target in _ROUNDINGS:
            return True
        source = uncast(node)
        if source is None:
            return False
        if source.meta["val"].is_floating_point() and source.meta["val"].dtype != node.meta["val"].dtype:
            return False
        node = source
    return True


@either_side
def _and(checks: Checks, node: Node, kept: str, mask: object) -> Dead | None:
    """A bit mask that keeps every bit that its operand can have."""
    x, bits = arguments_of(node)[kept], checks.constant(mask)
    if not is_integer(x) or not isinstance(bits, int):
        return None
    values = checks.values(x)
    if not values.intervals:
        return None
    needed = -1 if values.min < 0 else (1 << int(values.max).bit_length()) - 1
    return checks.pass_on(node, kept, checks.proof(x)) if bits & needed == needed else None


@either_side
def _or(checks: Checks, node: Node, kept: str, mask: object) -> Dead | None:
    sets_no_bit = is_integer(arguments_of(node)[kept]) and checks.constant(mask) == 0
    return checks.pass_on(node, kept, "no bit is set") if sets_no_bit else None


def _nan_to_num(checks: Checks, node: Node) -> Verdict:
    x = node.args[0]
    if not is_tensor(x):
        return None
    values = checks.values(x)
    if values.nan or not values.intervals or not (-math.inf < values.min and values.max < math.inf):
        return None
    return checks.pass_on(node, "self", checks.proof(x), float_gradient=True)


HANDLERS: dict[object, Handler] = {
    **dict.fromkeys((aten.clamp.default, aten.clip.default, aten.clamp.Tensor, aten.clip.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_min.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_max.default, aten.clamp_max.Tensor), _clamp),
    **dict.fromkeys((aten.maximum.default, aten.max.other), _maximum),
    **dict.fromkeys((aten.minimum.default, aten.min.other), _minimum),
    **dict.fromkeys((aten.relu.default, aten.abs.default, aten.absolute.default), _positive),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _reduced(_signed_as_divisor)),
    **dict.fromkeys((aten.fmod.Scalar, aten.fmod.Tensor), _reduced(_signed_as_before)),
    **dict.fromkeys(_ROUNDINGS, _rounding),
    **dict.fromkeys((aten.bitwise_and.Scalar, aten.bitwise_and.Tensor, aten.__and__.Scalar, aten.__and__.Tensor), _and),
    **dict.fromkeys((aten.bitwise_or.Scalar, aten.bitwise_or.Tensor, aten.__or__.Scalar, aten.__or__.Tensor), _or),
    aten.nan_to_num.default: _nan_to_num,
}
