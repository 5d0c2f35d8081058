"""Two tensors over named axes, multiplied: which axes a GEMM has in which role, and what an order of products costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from fxopt.patterns.contractions.terms import Axis, Factor, Term
from fxopt.shape.sizes import Size, depend_alike, static

Axes = tuple[Axis, ...]
_UNKNOWN = 256  # rows, where a batch is not known


@dataclass(frozen=True)
class Roles:
    """batch: in both and kept; inner: in both and summed; left and right: in one of them."""

    batch: Axes
    inner: Axes
    left: Axes
    right: Axes

    @classmethod
    def of(cls, a: Axes, b: Axes, kept: Collection[Axis]) -> Roles:
        shared = [axis for axis in a if axis in b]
        return cls(
            tuple(axis for axis in shared if axis in kept),
            tuple(axis for axis in shared if axis not in kept),
            tuple(axis for axis in a if axis not in b),
            tuple(axis for axis in b if axis not in a),
        )

    @property
    def out(self) -> Axes:
        return self.batch + self.left + self.right


def is_full(term: Term) -> bool:
    """Whether every axis that is summed is in two factors, and every axis of the result in one."""
    count = {axis: sum(axis in factor.axes for factor in term.factors) for axis in _all(term)}
    return all(count[axis] >= (1 if axis in term.axes else 2) for axis in count)


def linear_order(term: Term) -> tuple[Factor, Factor, Roles] | None:
    """(x, weight, roles) where the term is linear(x, weight) as it is laid out."""
    if len(term.factors) != 2:
        return None
    for x, weight in itertools.permutations(term.factors):
        roles = Roles.of(x.axes, weight.axes, term.axes)
        if roles.batch or not roles.inner or any(static(axis.size) is None for axis in weight.axes):
            continue
        if term.axes == roles.left + roles.right:
            return x, weight, roles
    return None


def orders(term: Term) -> Iterator[tuple[Factor, Factor, Factor, Axes]]:
    """(a, b, last, axes of a * b) for the orders in which three factors may be multiplied."""
    for last in range(3):
        a, b = (factor for place, factor in enumerate(term.factors) if place != last)
        kept = {*term.axes, *term.factors[last].axes}
        yield a, b, term.factors[last], Roles.of(a.axes, b.axes, kept).out


def spread_order(term: Term) -> tuple[Factor, Factor, Factor, Axes] | None:
    """(a, b, last, axes of a * b) where a * b sums nothing, and so is as large in any order: the one in which both are
    read as they lie, and a GEMM sums a * b as it lies. Only where the rows of a batch are in front everywhere.
    """
    if len(term.factors) != 3 or not term.dims or len(term.dims[0]) != 1 or static(term.axes[0].size) is not None:
        return None
    batch = term.axes[0]
    if any(batch in factor.axes and factor.dims[0] != (batch,) for factor in term.factors):
        return None
    if any(depend_alike(axis.size, batch.size) for axis in _all(term) - {batch}):
        return None  # it stays as it is where only some of the rows are computed, and its size is not theirs
    if any(set(axes) in (set(a.axes), set(b.axes)) for a, b, _, axes in orders(term)):
        return None  # a gate in front of a linear
    for a, b, last, axes in orders(term):
        roles = Roles.of(last.axes, axes, term.axes)
        if set(axes) != {*a.axes, *b.axes} or roles.batch[:1] != (batch,) or not (roles.inner and roles.right):
            continue
        for behind in (roles.inner + roles.right, roles.right + roles.inner):
            if all(_in_order(factor.axes, roles.batch + behind) for factor in (a, b)):
                return a, b, last, roles.batch + behind
    return None


def _in_order(axes: Axes, all_axes: Axes) -> bool:
    places = [all_axes.index(axis) for axis in axes]
    return places == sorted(places)


def elements(shape: Iterable[Size]) -> int:
    """About how many elements a tensor of this shape has."""
    known = (static(size) for size in shape)
    return math.prod(_UNKNOWN if size is None else size for size in known)


def _all(term: Term) -> set[Axis]:
    return {*term.axes, *(axis for factor in term.factors for axis in factor.axes)}
