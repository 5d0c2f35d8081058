"""Where the result ends: from the product with the values down to where its heads are merged again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.attention.strided import Axes, Factor
from fxopt.patterns.constants import constant_of
from fxopt.shape.sizes import Size, product, same, static, tensor_of
from fxopt.shape.view_operators import REGROUPS, SAME, through
from fxopt.shape.view_steps import moved

aten = torch.ops.aten
_REGULAR = {*REGROUPS, *SAME, aten.cat.default}  # whose results lie in memory as they are read
Groups = tuple[tuple[Size, ...], ...]  # of each batch axis the sizes of its factors


@dataclass(frozen=True)
class Merged:
    """A node that is the result in memory, its factors in this order, but for `missing` dims of size 1 in front.

    counts: how many of the factors are merged into each axis of the node.
    """

    node: Node
    order: tuple[int, ...]
    missing: int
    counts: tuple[int, ...]


def merged_of(summed: Node, out: tuple[int, ...], groups: Groups, queries: tuple, channels: tuple) -> Merged:
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
        if node.target in _REGULAR:
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
    users = readers(node)
    if len(users) != 1:
        return None
    (user,) = users
    if user.op != "call_function" or not user.args or user.args[0] is not node:
        return None
    if user.target in (aten.split.Tensor, aten.chunk.default, aten.unbind.int):
        return _split_and_joined(user, axes)
    if tensor_of(user) is None or user.meta["val"].dtype != node.meta["val"].dtype:
        return None
    _, step = through(user) or (node, None)
    changed = moved(axes, step, Factor.split)
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
        if not same(split.meta["val"][0].shape[dim], product(sizes_of(axis[1:]))):
            return None
        rest[dim] = axis[1:]
    at %= len(rest)
    rest[at] = (axis[0], *rest[at])
    return join, tuple(rest)


def readers(node: Node) -> list[Node]:
    """Who reads the values of a node, and not its sizes."""
    return [user for user in node.users if constant_of(user) is None]


def sizes_of(axis: tuple[Factor, ...]) -> tuple[Size, ...]:
    """Of its factors."""
    return tuple(factor.size for factor in axis)
