"""What target attention computes, as data: the contract between the pattern, the reference and the kernel.

    scores[b, t] = last channel of steps(bias + sum of terms)      terms: W[:, start:] (scale * row * position)
    result       = tail(scores), or the sum of positions[values] weighted by it

A term reads a source of rows ([B, D], the query), of positions ([B, T, D], the keys), or the product of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..words import Worded

MOST_REGISTERS = 12
MOST_WIDTH_ON_CUDA, MOST_POSITIONS_ON_CUDA = 128, 1024
PARAMETER, CONSTANT = 100, 10_000  # from these numbers on an operand is one of the parameters, or of the constants

# In the order of the enums in job.h.
LINEAR, BATCH_NORM, ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, NEG, EXP, SIGMOID, TANH, SILU, PRELU = range(14)
BOUNDS = (MAXIMUM, MINIMUM)  # with a constant: on the right the bound of a clamp, on the left the 0 of a relu
SCALE, SHIFT, FILL, FILL_WHERE, TIMES_MASK, PLUS_MASK, SOFTMAX = range(7)


@dataclass(frozen=True)
class Term:
    """`scale` times the product of a row source and a position source, for the weight's columns from `start` on.

    -1 stands for a source that is not in the product.
    """

    row: int
    position: int
    start: int
    width: int
    scale: float


@dataclass(frozen=True)
class Step:
    """registers[out] = op(left, right); right is a layer of LINEAR, a norm of BATCH_NORM, else an operand."""

    op: int
    out: int
    left: int
    right: int = 0


@dataclass(frozen=True)
class Norm:
    """A batch norm with its running statistics; parameters by number, -1 where there is none."""

    mean: int
    variance: int
    weight: int
    bias: int
    eps: float


@dataclass(frozen=True)
class TailStep:
    """One step on the scores of a row, with a mask [B, T] by number, or a value.

    FILL puts the value where the mask is not set, FILL_WHERE where it is.
    """

    op: int
    mask: int = -1
    value: float = 0.0


@dataclass(frozen=True)
class Plan(Worded):
    """Numbers are positions in the operator's lists. values: -1 where the scores are the result."""

    KIND: ClassVar[int] = 0x46584F54_0002
    OPERATOR: ClassVar[str] = "target_attention"

    weight: int
    bias: int
    terms: tuple[Term, ...]
    layers: tuple[tuple[int, int], ...]
    norms: tuple[Norm, ...]
    constants: tuple[float, ...]
    steps: tuple[Step, ...]
    score: int
    tail: tuple[TailStep, ...] = ()
    values: int = -1
