"""Cuts of tensors at places that may be known at run time alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import expression, shape_of

aten = torch.ops.aten
_ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Cut:
    """The elements [begin, end) of a dim of `source`. is_part: of a split."""

    source: Node
    dim: int
    begin: sympy.Expr
    end: sympy.Expr
    is_part: bool = False


def cut_of(node: Node) -> Cut | None:
    """What a slice, a narrow or one part of a split is of its source."""
    many, number = node, 0
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        many, number = node.args  # type: ignore[assignment]
    begins = _BEGINS.get(many.target)
    if begins is None:
        return None
    given: dict[str, Any] = arguments_of(many)
    begin = _sum(begins(given, number))
    if begin is None:
        return None
    source: Node = given["self"]
    dim = given["dim"] % len(shape_of(source))
    return Cut(source, dim, begin, begin + expression(shape_of(node)[dim]), many is not node)


def parts_of(split: Node) -> Cut | None:
    """All parts together of a split into sizes, which is an error where they are not all of its source."""
    given: dict[str, Any] = arguments_of(split)
    size = _sum(given["split_sizes"])
    return None if size is None else Cut(given["self"], given["dim"] % len(shape_of(given["self"])), _ZERO, size)


def _slice(given: dict[str, Any], number: int) -> list[Any]:
    return [given["start"] or 0 if given["step"] == 1 else None]


def _narrow(given: dict[str, Any], number: int) -> list[Any]:
    return [given["start"]]


def _part(given: dict[str, Any], number: int) -> list[Any]:
    return given["split_sizes"][:number]


_BEGINS: dict[Any, Callable[[dict[str, Any], int], list[Any]]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.split_with_sizes.default: _part,
}


def _sum(numbers: Iterable[Any]) -> sympy.Expr | None:
    """Of sizes and places; None where one is not known or counts from the end."""
    values = [number.meta["val"] if isinstance(number, Node) else number for number in numbers]
    if any(not isinstance(value, int | torch.SymInt) or (isinstance(value, int) and value < 0) for value in values):
        return None
    return sum(map(expression, values), _ZERO)
