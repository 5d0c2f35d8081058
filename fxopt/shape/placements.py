"""Where the rows of the batch are in a value, and what a rule asks of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import shape_of


@dataclass(frozen=True)
class Rows:
    """Row b takes the indices [b * times, (b + 1) * times) of `dim`; `times` may be a size, as of padded sequences."""

    dim: int
    times: int | sympy.Expr = 1

    @property
    def known_times(self) -> int | None:
        """None where it is a size."""
        return self.times if isinstance(self.times, int) else None


def times_of(size: sympy.Expr, batch: sympy.Expr) -> int | sympy.Expr | None:
    """How many indices of a dim each row of the batch takes; None where that is no whole number, or differs."""
    times = sympy.cancel(size / batch)
    if isinstance(times, sympy.Integer):
        return int(times)
    return times if times.is_integer and not times.free_symbols & batch.free_symbols else None


@dataclass(frozen=True)
class Fixed:
    """The same for all rows."""


@dataclass(frozen=True)
class Count:
    """A number that was computed from the number of rows; it may only shape tensors."""


class Unknown(Exception):
    """Not row by row, or no rule says so."""


Placement = Rows | Fixed | Count
Placements = dict[Node, Placement | None]
FIXED, COUNT = Fixed(), Count()


class Rowwise:
    """One call for its rule: arguments by their names, and where their rows are."""

    def __init__(self, node: Node, placements: dict[Node, Any], of_shape: Callable[[Any], Placement]) -> None:
        self.node, self.placements = node, placements
        self.arguments = arguments_of(node) if isinstance(node.target, OpOverload) else {}
        value = node.meta["val"] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"][0]
        self.shape, self.by_sizes = tuple(value.shape), of_shape(value)

    def rank(self, source: Node) -> int:
        return len(shape_of(source))

    def rows(self, source: Any) -> Rows | None:
        """None for what is no tensor, and for a tensor that all rows share."""
        found = self.placements.get(source) if isinstance(source, Node) else None
        return found if isinstance(found, Rows) else None

    def only(self, name: str) -> tuple[Node, Rows]:
        """The one argument with rows."""
        source: Any = self.arguments[name]
        others = [found for found in self.node.all_input_nodes if found is not source and self.rows(found)]
        found = self.rows(source)
        if others or found is None:
            raise Unknown
        return source, found

    def beside(self, name: str, mixed: Iterable[int]) -> Rows:
        """The rows of that argument, where they are in none of the dims that the call mixes."""
        source, found = self.only(name)
        rank = self.rank(source)
        if found.dim in [dim % rank for dim in mixed]:
            raise Unknown
        return found

    def dims(self, name: str, rank: int) -> list[int]:
        named: Any = self.arguments.get(name)
        if named is None or named == []:
            return list(range(rank))
        return [dim % rank for dim in (named if isinstance(named, Sequence) else [named])]


def agreed(found: Iterable[Rows]) -> Rows:
    """The one place that all say.

    Raises:
        Unknown: they differ, or there is none.
    """
    different = set(found)
    if len(different) != 1:
        raise Unknown
    return different.pop()
