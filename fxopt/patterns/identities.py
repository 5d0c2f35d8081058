"""Arithmetic that gives back what it got: x + 0, x * 1, -(-x), casts there and back, sums over one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.freshness import Freshness
from fxopt.shape.calls import name_of
from fxopt.shape.signed_zeros import SignedZeros
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Kept:
    """The argument that an operator gives back. plus_zero: its minus zeros become zeros."""

    source: Node
    why: str
    plus_zero: bool = False


def find_identities(search: Search) -> Iterator[Match | Reject]:
    """Operators whose result is one of their arguments, to the bit or as far as anything can tell."""
    if search.changes_modes:
        return
    found = [(node, kept) for node in search.graph.nodes if (kept := kept_by(node)) is not None]
    if not found:
        return
    aliases, strides, zeros = search.aliases, search.strides, SignedZeros(search.graph)
    fresh = Freshness(aliases)
    for node, kept in found:
        source = kept.source
        if any(map(aliases.edited, node.all_input_nodes)):
            continue
        if kept.plus_zero and zeros.matters(node) and not zeros.never_minus(source):
            yield Reject("x + 0.0 turns minus zero into zero, and the model's result may show it", node)
            continue
        if strides.may_become(node, source) and fresh.survives(node, source):
            yield Match(node, {"source": source, "why": kept.why})


def kept_by(node: Node) -> Kept | None:
    """The argument that `node` gives back, of the same shape, dtype and device."""
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    kept = rule(node) if rule is not None and tensor_of(node) is not None else None
    if kept is None or tensor_of(kept.source) is None or not same_shape(node, kept.source):
        return None
    before, after = kept.source.meta["val"], node.meta["val"]
    if (before.dtype, before.device) != (after.dtype, after.device) or before.is_complex():
        return None
    return kept


def _add(node: Node) -> Kept | None:
    left, right = node.args[:2]
    for source, zero, scaled in ((left, right, False), (right, left, True)):
        if isinstance(source, Node) and constant_of(zero) == 0 and not (scaled and node.kwargs):
            floating = node.meta["val"].is_floating_point()
            return Kept(source, "+ 0", floating and not _is_minus_zero(zero))
    return None


def _is_minus_zero(number: object) -> bool:
    return isinstance(number, float) and math.copysign(1.0, number) < 0


def _neutral(number: int, sides: str) -> Callable[[Node], Kept | None]:
    """sides: which operands may be the neutral one; "right" or "both"."""

    def rule(node: Node) -> Kept | None:
        left, right = node.args[:2]
        if node.kwargs or len(node.args) > 2:
            return None
        if isinstance(left, Node) and constant_of(right) == number and not _is_minus_zero(right):
            return Kept(left, f"{_symbol(node)} {number}")
        if sides == "both" and isinstance(right, Node) and constant_of(left) == number:
            return Kept(right, f"{_symbol(node)} {number}")
        return None

    return rule


def _symbol(node: Node) -> str:
    return {"sub": "-", "mul": "*", "div": "/", "pow": "**"}[name_of(node)]


def _twice(node: Node) -> Kept | None:
    inner = node.args[0]
    if isinstance(inner, Node) and inner.target is node.target and isinstance(inner.args[0], Node):
        return Kept(inner.args[0], f"{name_of(node)} of itself")
    return None


def _cast(node: Node) -> Kept | None:
    """There and back, where the dtype in between holds every value."""
    inner = node.args[0]
    if not isinstance(inner, Node) or inner.target is not aten.to.dtype or not isinstance(inner.args[0], Node):
        return None
    source = inner.args[0]
    if tensor_of(source) is None or not _holds(inner.meta["val"].dtype, source.meta["val"].dtype):
        return None
    return Kept(source, f"to {str(inner.meta['val'].dtype).removeprefix('torch.')} and back, which loses nothing")


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` has one of its own in `wide`."""
    if narrow == torch.bool:
        return not wide.is_complex
    if wide == torch.bool or wide.is_complex or narrow.is_complex:
        return False
    if narrow.is_floating_point:
        wider = wide.is_floating_point and torch.finfo(wide).bits >= torch.finfo(narrow).bits
        return wider and torch.promote_types(wide, narrow) == wide
    limits = torch.iinfo(narrow)
    if not wide.is_floating_point:
        return torch.iinfo(wide).min <= limits.min and torch.iinfo(wide).max >= limits.max
    return limits.bits <= {torch.float64: 32, torch.float32: 16, torch.float16: 8, torch.bfloat16: 8}.get(wide, 0)


def _over_one(plus_zero: bool) -> Callable[[Node], Kept | None]:
    """A reduction over dims of size 1, which stay."""

    def rule(node: Node) -> Kept | None:
        source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, Node) or not isinstance(dims, list | tuple) or not dims:
            return None
        shape = shape_of(source)
        if any(not isinstance(dim, int) or static(shape[dim]) != 1 for dim in dims):
            return None
        return Kept(source, "over a single element", plus_zero and node.meta["val"].is_floating_point())

    return rule


def _repeat(node: Node) -> Kept | None:
    source, times = node.args
    if not isinstance(source, Node) or any(not isinstance(count, int) or count != 1 for count in times):  # type: ignore[union-attr]
        return None
    return Kept(source, "repeated once")


_RULES: dict[object, Callable[[Node], Kept | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _add),
    aten.sub.Tensor: _neutral(0, "right"),
    aten.mul.Tensor: _neutral(1, "both"),
    **dict.fromkeys((aten.div.Tensor, aten.pow.Tensor_Scalar), _neutral(1, "right")),
    **dict.fromkeys((aten.neg.default, aten.logical_not.default, aten.bitwise_not.default), _twice),
    aten.to.dtype: _cast,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _over_one(plus_zero=True)),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _over_one(plus_zero=False)),
    aten.repeat.default: _repeat,
}
