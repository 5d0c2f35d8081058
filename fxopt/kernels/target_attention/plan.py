"""What target attention computes, as data: the contract between the pattern, the reference and the kernel.

    scores[b, t] = last channel of steps(bias + sum of terms)      terms: W[:, start:] (scale * row * position)
    result       = tail(scores), or the sum of positions[values] weighted by it

A term reads a source of rows ([B, D], the query), of positions ([B, T, D], the keys), or the product of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..words import bits_of, float_of

VERSION = 0x46584F54_0001  # cpu.cpp checks it
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
class Plan:
    """Numbers are positions in the operator's lists. values: -1 where the scores are the result."""

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

    def words(self, rows: int, positions: int, masks: int, params: int) -> list[int]:
        """As the int64 numbers that cpu.cpp reads, for lists of these lengths."""
        words = [
            VERSION,
            rows,
            positions,
            masks,
            params,
            self.weight,
            self.bias,
            self.score,
            self.values,
            len(self.terms),
        ]
        for term in self.terms:
            words += [term.row, term.position, term.start, term.width, bits_of(term.scale)]
        words += [len(self.layers), *(number for layer in self.layers for number in layer), len(self.norms)]
        for norm in self.norms:
            words += [norm.mean, norm.variance, norm.weight, norm.bias, bits_of(norm.eps)]
        words += [len(self.constants), *map(bits_of, self.constants), len(self.steps)]
        for step in self.steps:
            words += [step.op, step.out, step.left, step.right]
        words.append(len(self.tail))
        for tail in self.tail:
            words += [tail.op, tail.mask, bits_of(tail.value)]
        return words

    @classmethod
    def of(cls, words: list[int]) -> Plan:
        """The inverse of :meth:`words`."""
        at = iter(words)
        if next(at) != VERSION:
            raise ValueError("fxopt.target_attention: expected a plan made by words()")
        _take(at, 4)
        weight, bias, score, values = (next(at) for _ in range(4))
        terms = tuple(Term(*_take(at, 4), float_of(next(at))) for _ in range(next(at)))  # type: ignore[call-arg]
        layers = tuple((next(at), next(at)) for _ in range(next(at)))
        norms = tuple(Norm(*_take(at, 4), float_of(next(at))) for _ in range(next(at)))  # type: ignore[call-arg]
        constants = tuple(float_of(next(at)) for _ in range(next(at)))
        steps = tuple(Step(*_take(at, 4)) for _ in range(next(at)))
        tail = tuple(TailStep(*_take(at, 2), float_of(next(at))) for _ in range(next(at)))  # type: ignore[call-arg]
        return cls(weight, bias, terms, layers, norms, constants, steps, score, tail, values)


def _take(words: Iterator[int], count: int) -> Any:
    return [next(words) for _ in range(count)]
