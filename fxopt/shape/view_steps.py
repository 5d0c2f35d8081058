"""What a view operator does to the axes of a tensor, as data, and what becomes of axes that have names.

A *dim* of named axes is a tuple of them, outermost first: none for a dim of size 1, several where a reshape has joined
them. A name is anything that has a `size`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import sympy

from fxopt.shape.sizes import Size, expression, product, same, static


@dataclass(frozen=True)
class Slice:
    """`size` indices from `start` on; whether they reach the end of the dim."""

    dim: int
    start: int
    size: Size
    to_end: bool


@dataclass(frozen=True)
class Select:
    """index: not negative."""

    dim: int
    index: int


@dataclass(frozen=True)
class Permute:
    order: tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Unsqueeze:
    dim: int


@dataclass(frozen=True)
class Expand:
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Contiguous:
    """No view: the same elements, maybe copied to have contiguous strides."""


Step = Slice | Select | Permute | Reshape | Unsqueeze | Expand | Contiguous


class Named(Protocol):
    @property
    def size(self) -> Size: ...


Name = TypeVar("Name", bound=Named)
Dim = tuple[Name, ...]
Split = Callable[[Name, int], Dim]  # an axis and the size of its outer part -> both parts


def moved(
    dims: Sequence[Dim], step: Step | None, split: Split | None = None, spread: Callable[[Size], Dim] | None = None
) -> tuple[Dim, ...] | None:
    """The dims behind a step that shows every element; None behind any other one.

    split: cuts an axis in two where a reshape does; without it, such a reshape gives None.
    spread: the axes of a dim that is expanded to a size; without it, no expansion is followed.
    """
    match step:
        case Contiguous():
            return tuple(dims)
        case Permute(order):
            return tuple(dims[dim] for dim in order)
        case Unsqueeze(dim):
            return (*dims[:dim], (), *dims[dim:])
        case Reshape(shape):
            return regrouped([axis for dim in dims for axis in dim], shape, split)
        case Expand(shape) if spread is not None:
            return _spread(dims, shape, spread)
    return None


def regrouped(axes: Sequence[Name], shape: Sequence[Size], split: Split | None = None) -> tuple[Dim, ...] | None:
    """The axes, in their order, as the dims of a tensor of this shape."""
    left, dims = list(axes), list[Dim]()
    for size in shape:
        taken: list[Name] = []
        while not same(have := product(axis.size for axis in taken), size):
            if not left:
                return None
            whole = static(left[0].size)
            if split and whole is not None and (wanted := _quotient(size, have)) is not None and wanted < whole:
                if wanted < 1 or whole % wanted:
                    return None
                left[:1] = split(left[0], wanted)
            taken.append(left.pop(0))
        dims.append(tuple(taken))
    return None if left else tuple(dims)


def _quotient(size: Size, divisor: Size) -> int | None:
    """How often one size is in another one, where that is a number."""
    whole, part = static(size), static(divisor)
    if whole is not None and part is not None:
        return whole // part if part and whole % part == 0 else None
    ratio = sympy.cancel(expression(size) / expression(divisor))
    return int(ratio) if ratio.is_Integer else None


def _spread(dims: Sequence[Dim], shape: Sequence[Size], spread: Callable[[Size], Dim]) -> tuple[Dim, ...] | None:
    """Dims of size 1, and new ones in front, become those of `shape`; the others must be what they are."""
    result: list[Dim] = []
    for dim, size in zip(((),) * (len(shape) - len(dims)) + tuple(dims), shape, strict=True):
        if dim and not same(product(axis.size for axis in dim), size):
            return None
        result.append(dim or (() if static(size) == 1 else spread(size)))
    return tuple(result)
