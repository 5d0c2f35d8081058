"""Sums of the products of all pairs of fields: the second order of factorization machines, and bi-interactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.interactions import movement, products
from fxopt.patterns.interactions.dots import joint_vectors
from fxopt.patterns.interactions.terms import Terms
from fxopt.shape.calls import only_user
from fxopt.shape.sizes import is_float32, same, shape_of, static
from fxopt.shape.view_operators import viewed

aten = torch.ops.aten


@dataclass(frozen=True)
class PairSum:
    """anchor = scale * sum over i < j of the products of vectors i and j, each times its weight.

    vectors: nodes that together are [B, F, D]; weights: [B, F, 1], or None.
    total: summed over D too. anchor is [B, D], or [B] then, with axes of size 1 anywhere.
    """

    anchor: Node
    vectors: tuple[Node, ...]
    weights: Node | None = None
    scale: float = 1.0
    total: bool = False


def find_pair_sums(search: Search) -> Iterator[Match | Reject]:
    """(sum x)^2 - sum x^2, and the pairs' products summed."""
    if search.changes_modes:
        return
    terms = Terms(search.aliases, movement.RULES | products.RULES)
    for node in search.graph.nodes:
        found = _of_squares(node) if node.target is aten.sub.Tensor else _of_products(node, terms)
        if found is None:
            continue
        found = _with_tail(_with_weights(found))
        reads = [*found.vectors, *([found.weights] if found.weights is not None else [])]
        match = Match(found.anchor, {"pair_sum": found, "reads": tuple(reads)})
        yield search.unedited(match, [*reads, found.anchor, node], node, "a tensor it reads is edited in place")


def _of_squares(node: Node) -> PairSum | None:
    """(sum x)^2 - sum x^2 over the fields: twice the sum of the pairs."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(argument, Node) for argument in node.args):
        return None
    square_of_sum, sum_of_squares = node.args
    outer, inner = _squared(square_of_sum), _field_sum(sum_of_squares)
    summed, x = _field_sum(outer), _squared(inner)
    if summed is None or x is None or summed is not x or shape_of(square_of_sum) != shape_of(sum_of_squares):  # type: ignore[arg-type]
        return None
    return PairSum(node, (x,), scale=2.0) if _is_fields(x) else None


def _squared(node: object) -> Node | None:
    """x of x^2."""
    if not isinstance(node, Node):
        return None
    x, *others = node.args or (None,)
    if node.target is aten.square.default or (node.target is aten.pow.Tensor_Scalar and others == [2]):
        return x if isinstance(x, Node) else None
    return x if isinstance(x, Node) and node.target is aten.mul.Tensor and others == [x] else None


def _field_sum(node: object) -> Node | None:
    """x of a sum of [B, F, D] over F."""
    if not isinstance(node, Node) or node.target is not aten.sum.dim_IntList or node.kwargs:
        return None
    x, dims = node.args[:2]
    return x if isinstance(x, Node) and len(shape_of(x)) == 3 and dims in ([1], [-2], (1,), (-2,)) else None


def _is_fields(x: Node) -> bool:
    return is_float32(x, "cpu", rank=3) and static(shape_of(x)[2]) is not None


def _of_products(node: Node, terms: Terms) -> PairSum | None:
    """The products of all pairs, once each, summed over the pairs."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or not isinstance(node.args[0], Node):
        return None
    value = terms.of(node.args[0])
    dims = node.args[1]
    if value is None or value.terms.shape[-1] != 2 or value.axes not in ("bfl", "bf") or dims not in ([1], (1,)):
        return None
    pairs = [tuple(sorted(pair)) for pair in value.terms.tolist()]
    used = sorted({term for pair in pairs for term in pair})
    count = len(used)
    if (
        count < 3
        or len(pairs) != count * (count - 1) // 2
        or len(set(pairs)) != len(pairs)
        or any(a == b for a, b in pairs)
    ):
        return None
    vectors = joint_vectors(used, terms)
    if (
        isinstance(vectors, Reject)
        or sum(static(shape_of(x)[1]) or 0 if len(shape_of(x)) == 3 else 1 for x in vectors) != count
    ):
        return None
    return PairSum(node, vectors, total=value.axes == "bf")


def _with_weights(found: PairSum) -> PairSum:
    """x as w * x, where nothing else reads the product."""
    x = found.vectors[0]
    if len(found.vectors) > 1 or x.target is not aten.mul.Tensor or found.scale != 2.0:
        return found
    own = {user for user in x.users if _squared(user) is x or _field_sum(user) is x}
    for vectors, weights in (x.args[:2], x.args[1::-1]):
        if not isinstance(vectors, Node) or not isinstance(weights, Node) or own != set(x.users):
            continue
        if not is_float32(weights, rank=3) or not _is_fields(vectors):
            continue
        sizes = shape_of(vectors)
        if all(map(same, shape_of(x), sizes)) and all(map(same, shape_of(weights), (*sizes[:2], 1))):
            return replace(found, vectors=(vectors,), weights=weights)
    return found


def _with_tail(found: PairSum) -> PairSum:
    """What follows: a factor, the sum over lanes, and views that only change axes of size 1."""
    user = only_user(found.anchor)
    longer = user and (_scaled(found, user) or _totalled(found, user) or _reshaped(found, user))
    return _with_tail(longer) if longer else found


def _scaled(found: PairSum, user: Node) -> PairSum | None:
    if user.target not in (aten.mul.Tensor, aten.div.Tensor) or len(user.args) != 2 or user.kwargs:
        return None
    other = user.args[1] if user.args[0] is found.anchor else user.args[0]
    factor = constant_of(other)
    if factor is None or isinstance(other, Node):
        return None
    if user.target is aten.mul.Tensor:
        return replace(found, anchor=user, scale=found.scale * factor)
    return replace(found, anchor=user, scale=found.scale / factor) if factor and user.args[0] is found.anchor else None


def _totalled(found: PairSum, user: Node) -> PairSum | None:
    if found.total or user.target is not aten.sum.dim_IntList or user.kwargs:
        return None
    dims, shape = user.args[1], shape_of(found.anchor)
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return None
    summed = {dim % len(shape) for dim in dims}  # type: ignore[operator]
    wide = {dim for dim, size in enumerate(shape) if static(size) != 1}
    if 0 in summed or not wide - {0} <= summed:
        return None
    return replace(found, anchor=user, total=True)


def _reshaped(found: PairSum, user: Node) -> PairSum | None:
    source, view = viewed(user) or (None, None)
    if view is None or source is not found.anchor or not view.is_reshape(shape_of(source)):
        return None
    return replace(found, anchor=user)
