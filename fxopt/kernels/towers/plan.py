"""A tower program: linears, mixtures of experts and copies on the rows of some inputs, as data.

Steps write columns of buffers; a buffer is an output, [..., width] or [..., inner, width / inner], or scratch between
the steps. So a concat or a stack of results costs nothing, and the layers of a tower follow each other in one call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..words import Worded, text_of, words_in

Activation = Literal["none", "relu", "sigmoid", "tanh"]


@dataclass(frozen=True)
class Source:
    """Columns from `start` on, of a buffer or of an input; place: the index of the input's second last dim, if any."""

    tensor: int
    place: int = -1
    start: int = 0
    is_input: bool = True


@dataclass(frozen=True)
class Buffer:
    """width: columns. inner > 0: an output of shape [..., inner, width / inner]."""

    width: int
    inner: int = 0
    is_output: bool = True


@dataclass(frozen=True)
class Written:
    """What every step says: `width` columns of `buffer` are its result, from `column` on."""

    buffer: int
    column: int
    width: int


@dataclass(frozen=True)
class Linear(Written):
    """activation(x W^T + b). x: as many columns as W [N, K] has."""

    x: Source
    weight: int
    bias: int  # -1: none
    activation: Activation = "none"

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Mixture(Written):
    """sum_e w_e expert_e, where w is the gate [..., E] or its softmax."""

    gate: Source
    softmax: bool
    experts: tuple[Source, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.gate, *self.experts)


@dataclass(frozen=True)
class Copy(Written):
    x: Source

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Product(Written):
    """left * right, element by element."""

    left: Source
    right: Source

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.left, self.right)


Step = Linear | Mixture | Copy | Product


@dataclass(frozen=True)
class Plan(Worded):
    """inner: of each input, whether its second last dim is indexed by `place` and no row.

    steps: as :func:`leveled` gives them.
    """

    KIND: ClassVar[int] = 0x4658544F_0002
    OPERATOR: ClassVar[str] = "towers"

    inner: tuple[bool, ...]
    n_weights: int
    n_biases: int
    buffers: tuple[Buffer, ...]
    steps: tuple[tuple[int, Step], ...]

    @property
    def outputs(self) -> list[Buffer]:
        return [buffer for buffer in self.buffers if buffer.is_output]


def encode(plan: Plan) -> str:
    """The words that the kernel reads (program.h), as a text."""
    return text_of(plan.words())


@functools.lru_cache(1024)
def decode(encoded: str) -> Plan:
    """The inverse of :func:`encode`."""
    return Plan.of(words_in(encoded))


def leveled(steps: Sequence[Step]) -> tuple[tuple[int, Step], ...]:
    """The steps with their levels: each comes after those that write the buffers it reads."""
    level_of: dict[int, int] = {}  # of a buffer: the highest of its writers
    found = []
    for step in steps:
        read = [level_of.get(source.tensor, -1) for source in step.sources if not source.is_input]
        level = max(read, default=-1) + 1
        level_of[step.buffer] = max(level, level_of.get(step.buffer, 0))
        found.append((level, step))
    return tuple(sorted(found, key=lambda item: item[0]))
