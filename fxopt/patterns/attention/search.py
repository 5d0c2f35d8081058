"""Finds softmax(q k^T) v: from the softmax up to queries and keys, down to the values and the merged heads."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.attention.plan import (
    ADDED,
    CAUSAL,
    FILL_SET,
    FILL_UNSET,
    MOST_FACTORS,
    NO_MASK,
    Axis,
    Operand,
    Plan,
)
from fxopt.normalize import switches_gradients
from fxopt.patterns.attention.strided import Axes, Factor, Strided, regrouped, reordered, strided
from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.views_of import REGROUPS, SAME
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, product, same, shape_of, static, tensor_of

aten = torch.ops.aten
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REGULAR = {*REGROUPS, *SAME, aten.cat.default}  # whose results lie in memory as they are read
_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Merged:
    """A node that is the result in memory, its factors in this order, but for `missing` dims of size 1 in front.

    counts: how many of the factors are merged into each axis of the node.
    """

    node: Node
    order: tuple[int, ...]
    missing: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """The operator's inputs and its plan.

    weights: the softmax, where others read it too.
    """

    query: Node
    key: Node
    value: Node
    mask: Node | None
    plan: Plan
    groups: tuple[int, ...]  # how many batch factors are merged into each axis in front of queries and keys
    merged: Merged
    weights: Node | None


class _NotFound(Exception):
    """Why not; the text is the reason."""


@dataclass
class _Product:
    """Scores: queries [..., L, d] and keys [..., S, d], each as the product reads it."""

    query: Strided
    key: Strided
    scale: float = 1.0
    masking: int = NO_MASK
    fill: float = 0.0
    mask: Node | None = None


def find_attention(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `found` and what it reads."""
    if switches_gradients(module.graph):
        return
    aliases = Aliases(module.graph)
    for node in module.graph.nodes:
        if node.target not in (aten.softmax.int, _ATTENTION):
            continue
        value = tensor_of(node)
        if value is None or value.dtype not in _FLOATS or value.device.type != "cpu":
            continue
        try:
            found = (_of_softmax if node.target is aten.softmax.int else _of_operator)(node, inference)
        except _NotFound as reason:
            yield Reject(str(reason), node)
            continue
        if found is None:
            continue
        read = [found.query, found.key, found.value, *([found.mask] if found.mask else [])]
        if any(map(aliases.edited, (*read, found.merged.node, node))):
            yield Reject("something that it reads or gives is edited in place", node)
        else:
            yield Match(found.merged.node, {"found": found, "reads": read})


def _of_softmax(node: Node, inference: bool) -> Found | None:
    rank = len(shape_of(node))
    if node.kwargs or node.args[1] not in (-1, rank - 1) or (len(node.args) > 2 and node.args[2] is not None):
        return None
    scores = _scores(node.args[0])  # type: ignore[arg-type]
    used = _used(node)
    if scores is None or used is None:
        return None
    summed, values, out = used
    others = any(user is not summed for user in _readers(node))
    return _found(scores, values, out, summed, node if others else None, inference)


def _of_operator(node: Node, inference: bool) -> Found | None:
    """torch's own operator."""
    arguments: tuple[Any, ...] = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
    query, key, value, mask, dropout, causal = arguments[:6]
    mask = node.kwargs.get("attn_mask", mask)
    if dropout or node.kwargs.get("dropout_p"):
        return None
    if node.kwargs.get("enable_gqa") or not all(isinstance(side, Node) for side in (query, key, value)):
        return None
    d = static(shape_of(query)[-1])  # type: ignore[arg-type]
    scale = node.kwargs.get("scale")
    if d is None:
        return None
    scores = _Product(strided(query), strided(key), float(scale) if scale is not None else d**-0.5)  # type: ignore[arg-type]
    if causal or node.kwargs.get("is_causal"):
        scores.masking, scores.fill = CAUSAL, float("-inf")
    if isinstance(mask, Node):
        is_bool = mask.meta["val"].dtype == torch.bool
        if scores.masking or not (is_bool or mask.meta["val"].dtype == node.meta["val"].dtype):
            return None
        scores.masking, scores.fill, scores.mask = (FILL_UNSET if is_bool else ADDED), float("-inf"), mask
    values = strided(value)  # type: ignore[arg-type]
    return _found(scores, values, tuple(range(len(values.axes))), node, None, inference)


def _scores(node: Node) -> _Product | None:
    """Products of queries and keys, scaled and masked in any order."""
    if tensor_of(node) is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in _PRODUCTS:
        left, right = node.args
        return _Product(strided(left), _swapped(strided(right)))  # type: ignore[arg-type]
    if node.target is aten.baddbmm.default:
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
            return None
        mask, left, right = node.args
        return replace(_Product(strided(left), _swapped(strided(right))), masking=ADDED, mask=mask)  # type: ignore[arg-type]
    if node.target is aten.einsum.default:
        return _einsum(node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        left, right = node.args[:2]
        number = constant_of(right)
        inner = _scores(left) if number and isinstance(left, Node) else None
        if inner is None or inner.masking == ADDED:
            return None
        factor = float(number) if "mul" in str(node.target) else 1 / float(number)  # type: ignore[arg-type]
        return replace(inner, scale=inner.scale * factor, fill=inner.fill * factor)
    return _masked(node)


def _masked(node: Node) -> _Product | None:
    if node.target is aten.where.self:
        mask, one, two = node.args
        kept, other, masking = (one, two, FILL_UNSET) if constant_of(two) is not None else (two, one, FILL_SET)
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        kept, mask, other = node.args
        masking = FILL_SET
    elif node.target is aten.add.Tensor and not node.kwargs:
        kept, mask = node.args
        masking, other = ADDED, 0.0
        if isinstance(mask, Node) and isinstance(kept, Node) and _scores(kept) is None:
            kept, mask = mask, kept
    else:
        return None
    fill = constant_of(other)
    if fill is None or not isinstance(kept, Node) or not isinstance(mask, Node) or tensor_of(mask) is None:
        return None
    inner = _scores(kept)
    dtype = torch.bool if masking != ADDED else node.meta["val"].dtype
    if inner is None or inner.masking != NO_MASK or mask.meta["val"].dtype != dtype:
        return None
    if len(shape_of(kept)) != len(shape_of(node)) or not all(map(same, shape_of(kept), shape_of(node))):
        return None
    return replace(inner, masking=masking, fill=float(fill), mask=mask)


def _einsum(node: Node) -> _Product | None:
    """Any letters: batch letters in all three, one of queries, one of keys, one that is summed, in matrix order."""
    letters = _letters(node)
    if letters is None:
        return None
    left, right, out = letters
    if len(out) < 2:
        return None
    batch, L, S = out[:-2], out[-2], out[-1]
    summed = [letter for letter in left if letter in right and letter not in out]
    if len(summed) != 1:
        return None
    first, second = (strided(operand) for operand in node.args[1])  # type: ignore[union-attr, arg-type]
    if L in right:
        (left, first), (right, second) = (right, second), (left, first)
    order = [*batch, L, *summed], [*batch, S, *summed]
    if sorted(order[0]) != sorted(left) or sorted(order[1]) != sorted(right):
        return None
    return _Product(_ordered(first, left, order[0]), _ordered(second, right, order[1]))


def _letters(node: Node) -> tuple[str, str, str] | None:
    equation, operands = node.args[:2]
    inputs, arrow, out = str(equation).replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or "." in inputs or len(names) != 2 or len(operands) != 2:  # type: ignore[arg-type]
        return None
    if any(len(set(name)) < len(name) for name in (*names, out)):
        return None
    return names[0], names[1], out


def _ordered(operand: Strided, names: str, order: list[str]) -> Strided:
    return replace(operand, axes=tuple(operand.axes[names.index(letter)] for letter in order))


def _swapped(operand: Strided) -> Strided:
    return replace(operand, axes=(*operand.axes[:-2], operand.axes[-1], operand.axes[-2]))


def _readers(node: Node) -> list[Node]:
    """Who reads the values of a node, and not its sizes."""
    return [user for user in node.users if constant_of(user) is None]


def _used(softmax: Node) -> tuple[Node, Strided, tuple[int, ...]] | None:
    """(the product with the values, the values [..., S, d], the axes [..., L, d] in the product's order)"""
    for user in softmax.users:
        if user.target in _PRODUCTS and user.args[0] is softmax:
            values = strided(user.args[1])  # type: ignore[arg-type]
            return user, values, tuple(range(len(shape_of(user))))
        if user.target is aten.einsum.default and user.args[1][0] is softmax:  # type: ignore[index]
            letters = _letters(user)
            if letters is None:
                continue
            left, right, out = letters
            batch, L, S = left[:-2], left[-2], left[-1]
            channels = [letter for letter in right if letter not in left]
            if L in right or S in out or len(channels) != 1 or sorted(out) != sorted([*batch, L, *channels]):
                continue
            if sorted(right) != sorted([*batch, S, *channels]):
                continue
            values = _ordered(strided(user.args[1][1]), right, [*batch, S, *channels])  # type: ignore[index, arg-type]
            names = [*batch, L, *channels]
            return user, values, tuple(names.index(letter) for letter in out)
    return None


def _found(
    scores: _Product, values: Strided, out: tuple[int, ...], summed: Node, weights: Node | None, inference: bool
) -> Found | None:
    query, key = scores.query, scores.key
    sides = query, key, values
    if len({len(side.axes) for side in sides}) > 1 or values.scale != 1:
        return None
    groups = _groups(sides)
    positions = [query.axes[-2], query.axes[-1], key.axes[-2], values.axes[-1]]
    if groups is None or any(len(axis) > 1 for side in sides for axis in side.axes[-2:]):
        raise _NotFound("its heads, rows and channels do not lie at regular distances")
    if sum(map(len, groups)) > MOST_FACTORS:
        raise _NotFound(f"more than {MOST_FACTORS} dims of rows and heads")
    mask = None
    if scores.mask is not None and (mask := _mask(scores.mask, groups, positions[0], positions[2])) is None:
        raise _NotFound("its mask does not lie at regular distances")
    merged = _merged(summed, out, groups, positions[0], positions[3])
    plan = Plan(
        query=_operand(query, groups),
        key=_operand(key, groups),
        value=_operand(values, groups),
        mask=mask[1] if mask else None,
        masking=scores.masking,
        fill=scores.fill,
        scale=scores.scale * query.scale * key.scale,
        order=merged.order,
        weights=weights is not None or not inference,
        safe=summed.target is _ATTENTION,
    )
    return Found(query.base, key.base, values.base, mask[0] if mask else None, plan, groups_of(groups), merged, weights)


Groups = tuple[tuple[Size, ...], ...]  # of each batch axis the sizes of its factors


def groups_of(groups: Groups) -> tuple[int, ...]:
    return tuple(map(len, groups))


def _groups(sides: tuple[Strided, ...]) -> Groups | None:
    """The factors of each batch axis; sides that broadcast have none."""
    result = []
    for axes in zip(*(side.axes[:-2] for side in sides), strict=True):
        sizes = [tuple(factor.size for factor in axis) for axis in axes if axis]
        longest = max(sizes, key=len, default=())
        if not all(len(each) == len(longest) and all(map(same, each, longest)) for each in sizes):
            return None
        result.append(longest)
    return tuple(result)


def _operand(side: Strided, groups: Groups) -> Operand:
    axes: list[Axis] = []
    for axis, sizes in zip(side.axes, (*groups, (1,), (1,)), strict=True):
        axes += [_along(side, factor) for factor in axis] if axis else [Axis(-1, 0, 1)] * len(sizes)
    return Operand(tuple(axes), side.starts)


def _along(side: Strided, factor: Factor) -> Axis:
    size = static(factor.size)
    if factor.dim < 0:
        return Axis(-1, 0, 1 if size is None else size)
    whole = factor.step == 1 and same(factor.size, shape_of(side.base)[factor.dim])
    if size is None and not (whole and factor.dim not in dict(side.starts)):
        raise _NotFound("its rows do not lie at regular distances")
    return Axis(factor.dim, factor.step, -1 if size is None else size)


def _mask(node: Node, groups: Groups, queries: tuple, keys: tuple) -> tuple[Node, Operand] | None:
    sizes = (*groups, _sizes(queries), _sizes(keys))
    for mask in (strided(node), Strided.of(node)):
        missing = len(sizes) - len(mask.axes)
        if missing < 0 or mask.scale != 1 or mask.base.meta["val"].dtype != node.meta["val"].dtype:
            continue
        axes = (*((),) * missing, *mask.axes)
        fits = (
            not axis
            or (
                len(axis) == len(group)
                and all(same(factor.size, size) for factor, size in zip(axis, group, strict=True))
            )
            for axis, group in zip(axes, sizes, strict=True)
        )
        if all(fits):
            return mask.base, _operand(replace(mask, axes=axes), groups)
    return None


def _sizes(axis: tuple[Factor, ...]) -> tuple[Size, ...]:
    return tuple(factor.size for factor in axis)


def _merged(summed: Node, out: tuple[int, ...], groups: Groups, queries: tuple, channels: tuple) -> Merged:
    """Follows the result through what merges its heads again: the order that makes all of that a view."""
    sizes = [size for group in groups for size in group]
    numbers = iter(range(len(sizes)))
    logical: list[tuple[Factor, ...]] = [tuple(Factor(size, next(numbers), 1) for size in group) for group in groups]
    for number, axis in enumerate((queries, channels), len(sizes)):
        logical.append(tuple(Factor(factor.size, number, 1) for factor in axis))
    whole = {factor.dim: factor.size for axis in logical for factor in axis}
    node, axes = summed, tuple(logical[axis] for axis in out)
    best = _as_merged(node, axes, whole, len(sizes) + 2)
    assert best is not None
    while (step := _next(node, axes)) is not None:
        node, axes = step
        if node.target in REGULAR:
            best = _as_merged(node, axes, whole, len(sizes) + 2) or best
    return best


def _as_merged(node: Node, axes: Axes, whole: dict[int, Size], count: int) -> Merged | None:
    factors = [factor for axis in axes for factor in axis]
    if any(factor.step != 1 or not same(factor.size, whole[factor.dim]) for factor in factors):
        return None
    present = [factor.dim for factor in factors]
    missing = [number for number in range(count) if number not in present]
    return Merged(node, (*missing, *present), len(missing), tuple(map(len, axes)))


def _next(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """The one reader of a node, where it only arranges."""
    readers = _readers(node)
    if len(readers) != 1:
        return None
    (user,) = readers
    if user.op != "call_function" or not user.args or user.args[0] is not node:
        return None
    if user.target in (aten.split.Tensor, aten.chunk.default, aten.unbind.int):
        return _split_and_joined(user, axes)
    if tensor_of(user) is None or user.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if user.target in SAME:
        return user, axes
    changed = regrouped(axes, shape_of(user)) if user.target in REGROUPS else None
    if changed is None and user.target is not aten.expand.default:
        changed = reordered(user, axes)
    return None if changed is None else (user, changed)


def _split_and_joined(split: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """cat(split(x, n, dim), other): the pieces' number moves from one axis to the outside of another."""
    pieces = sorted(split.users, key=lambda piece: piece.args[1] if piece.target is operator.getitem else -1)  # type: ignore[arg-type, return-value]
    joins = {user for piece in pieces for user in piece.users}
    if len(joins) != 1 or any(piece.target is not operator.getitem for piece in pieces):
        return None
    (join,) = joins
    at: Any = join.args[1] if len(join.args) > 1 else 0
    if join.target is not aten.cat.default or list(join.args[0]) != pieces or len(pieces) != len(split.meta["val"]):  # type: ignore[arg-type]
        return None
    position = 1 if split.target is aten.unbind.int else 2
    dim = int(split.args[position]) % len(axes) if len(split.args) > position else 0  # type: ignore[arg-type]
    axis = axes[dim]
    if not axis or static(axis[0].size) != len(pieces):
        return None
    rest = list(axes)
    if split.target is aten.unbind.int:
        if len(axis) > 1:
            return None
        del rest[dim]
    else:
        if not same(split.meta["val"][0].shape[dim], product(_sizes(axis[1:]))):
            return None
        rest[dim] = axis[1:]
    at %= len(rest)
    rest[at] = (axis[0], *rest[at])
    return join, tuple(rest)
