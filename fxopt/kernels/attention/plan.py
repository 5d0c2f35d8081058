"""Scaled dot-product attention over strided operands, as data: the contract of the pattern, the reference, the kernel.

    out[f, l, d] = sum over s of softmax(scale * q[f, l, :] . k[f, s, :] + mask[f, l, s]) v[f, s, d]

or with silu(...) / divisor in place of the softmax (HSTU: Zhai et al., arXiv:2402.17152).

f are the batch factors (rows, heads). An operand is any tensor in which each axis is a regular step along one dim, so
that splitting, stacking and transposing heads costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..words import Worded

NO_MASK, FILL_SET, FILL_UNSET, ADDED, CAUSAL = range(5)
SOFTMAX, SILU = range(2)
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
class Plan(Worded):
    """order: of the result in memory; number n is batch factor n, behind them come queries and channels.

    weights: whether the weights of the values are a second result, [factors, queries, keys].
    safe: a query without any key gives 0, as in torch's own attention, and not NaN, as its softmax does.
    weighing: SOFTMAX, or SILU: silu of the scores, divided by `divisor`.
    bias: added to the scores before a mask fills them; where nothing is filled, a mask of ADDED does the same.
    """

    KIND: ClassVar[int] = 0x46584153_0003
    OPERATOR: ClassVar[str] = "attention"

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
    weighing: int = SOFTMAX
    divisor: float = 1.0
    bias: Operand | None = None

    @property
    def factors(self) -> int:
        return len(self.query.axes) - 2
