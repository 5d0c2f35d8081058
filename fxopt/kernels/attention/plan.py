"""Scaled dot-product attention over strided operands, as data: the contract of the pattern, the reference, the kernel.

    out[f, l, d] = sum over s of softmax(scale * q[f, l, :] . k[f, s, :] + mask[f, l, s]) v[f, s, d]

f are the batch factors (rows, heads). An operand is any tensor in which each axis is a regular step along one dim, so
that splitting, stacking and transposing heads costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..words import bits_of, float_of

VERSION = 0x46584153_0001  # cpu.cpp checks it
NO_MASK, FILL_SET, FILL_UNSET, ADDED, CAUSAL = range(5)
MOST_FACTORS = 4


@dataclass(frozen=True)
class Axis:
    """Index i of an axis is index i * step of the tensor's `dim` (-1: the same for all i). size -1: all of the dim."""

    dim: int
    step: int
    size: int


@dataclass(frozen=True)
class Operand:
    """Axes: the batch factors, then the positions, then the channels (of a mask: queries, then keys).

    starts: (dim, index) where the operand begins, for the dims where that is not 0.
    """

    axes: tuple[Axis, ...]
    starts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """order: of the result in memory; number n is batch factor n, behind them come queries and channels.

    weights: whether the softmax is a second result, [factors, queries, keys].
    safe: a query without any key gives 0, as in torch's own attention, and not NaN, as its softmax does.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    masking: int
    fill: float
    scale: float
    order: tuple[int, ...]
    weights: bool
    safe: bool = False

    @property
    def factors(self) -> int:
        return len(self.query.axes) - 2

    def words(self) -> list[int]:
        """As the int64 numbers that cpu.cpp reads."""
        words = [
            VERSION,
            self.factors,
            bits_of(self.scale),
            self.masking,
            bits_of(self.fill),
            self.weights + 2 * self.safe,
            *self.order,
        ]
        for operand in (self.query, self.key, self.value, *([self.mask] if self.mask else [])):
            for axis in operand.axes:
                words += [axis.dim, axis.step, axis.size]
            words += [len(operand.starts), *(number for start in operand.starts for number in start)]
        return words

    @classmethod
    def of(cls, words: list[int]) -> Plan:
        """The inverse of :meth:`words`."""
        at = iter(words)
        if next(at) != VERSION:
            raise ValueError("fxopt.attention: expected a plan made by words()")
        factors, scale, masking, fill, flags = (next(at) for _ in range(5))
        order = tuple(next(at) for _ in range(factors + 2))
        query, key, value = (_operand(at, factors) for _ in range(3))
        mask = _operand(at, factors) if masking in (FILL_SET, FILL_UNSET, ADDED) else None
        return cls(
            query, key, value, mask, masking, float_of(fill), float_of(scale), order, bool(flags & 1), bool(flags & 2)
        )


def _operand(words: Iterator[int], factors: int) -> Operand:
    axes = tuple(Axis(next(words), next(words), next(words)) for _ in range(factors + 2))
    return Operand(axes, tuple((next(words), next(words)) for _ in range(next(words))))
