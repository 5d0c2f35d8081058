"""Products of tensors over named axes: what an einsum says, for operators that are no einsum.

A dim of a tensor is a tuple of axes: none for a dim of size 1, several where a reshape has joined them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fxopt.shape.sizes import Size, same, static


@dataclass(frozen=True, eq=False)
class Axis:
    size: Size


Dim = tuple[Axis, ...]


class Unfit(Exception):
    """This is no product over named axes."""


@dataclass(frozen=True)
class Factor:
    """A tensor of the product, and the axes of each of its dims."""

    node: Node
    dims: tuple[Dim, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for axis in dim)


@dataclass(frozen=True)
class Term:
    """The product of `factors`, summed over the axes that are not in `dims`.

    inside: the operators that compute it.
    """

    dims: tuple[Dim, ...]
    factors: tuple[Factor, ...]
    inside: tuple[Node, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for axis in dim)


def dims_of(shape: Sequence[Size]) -> tuple[Dim, ...]:
    """A fresh axis a dim."""
    return tuple(() if static(size) == 1 else (Axis(size),) for size in shape)


class Names:
    """Which axes are the same, or parts of another one; filled while a term is read."""

    def __init__(self) -> None:
        self._parts: dict[Axis, Dim] = {}
        self._spread: set[Axis] = set()

    def resolved(self, term: Term) -> Term:
        factors = tuple(Factor(factor.node, self.resolved_dims(factor.dims)) for factor in term.factors)
        return Term(self.resolved_dims(term.dims), factors, term.inside)

    def resolved_dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(self.atoms(dim) for dim in dims)

    def atoms(self, dim: Dim) -> Dim:
        return tuple(atom for axis in dim for atom in self._atoms(axis))

    def _atoms(self, axis: Axis) -> Iterator[Axis]:
        if axis not in self._parts:
            yield axis
        else:
            yield from self.atoms(self._parts[axis])

    def unify(self, left: Dim, right: Dim) -> None:
        """Let two dims of one size be the same axes."""
        ours, theirs = list(self.atoms(left)), list(self.atoms(right))
        while ours and theirs:
            a, b = ours.pop(0), theirs.pop(0)
            if a is b:
                continue
            if same(a.size, b.size):
                a, b = (b, a) if a in self._spread else (a, b)
                self._parts[b] = (a,)
            elif _larger(a, b):
                ours.insert(0, self.split(a, b.size))
                self._parts[b] = self.atoms((a,))[:1]
            elif _larger(b, a):
                theirs.insert(0, self.split(b, a.size, a))
            else:
                raise Unfit
        if ours or theirs:
            raise Unfit

    def split(self, axis: Axis, size: Size, first: Axis | None = None) -> Axis:
        """Make an axis two of which the first has `size`; returns the second."""
        whole, part = static(axis.size), static(size)
        if whole is None or part is None or whole % part:
            raise Unfit
        rest = Axis(whole // part)
        self._parts[axis] = (first or Axis(part), rest)
        return rest

    def spread(self, size: Size) -> Dim:
        """The axis of an expanded dim: a new one, which no factor has until another tensor's dim meets it."""
        axis = Axis(size)
        self._spread.add(axis)
        return (axis,)

    def is_spread(self, dim: Dim) -> bool:
        """Whether it has an axis that only says how often the rest is repeated."""
        return any(atom in self._spread for atom in self.atoms(dim))

    def halves(self, axis: Axis, size: int) -> Dim:
        """An axis as two, of which the first has `size`."""
        self.split(axis, size)
        return self._parts[axis]


def _larger(left: Axis, right: Axis) -> bool:
    a, b = static(left.size), static(right.size)
    return a is not None and b is not None and a > b
