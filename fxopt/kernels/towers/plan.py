"""A tower program: linears, mixtures of experts and copies on the rows of some inputs, as data.

Steps write columns of buffers; a buffer is an output, [..., width] or [..., inner, width / inner], or scratch between
the steps. So a concat or a stack of results costs nothing, and the layers of a tower follow each other in one call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..words import text_of, words_in

_VERSION = 1
ACTIVATIONS = ("none", "relu", "sigmoid", "tanh")


@dataclass(frozen=True)
class Source:
    """Columns from `start` on, of a buffer or of an input; place: the index of the input's second last dim, if any."""

    tensor: int
    place: int = -1
    start: int = 0
    is_input: bool = True

    @property
    def words(self) -> tuple[int, ...]:
        return (self.tensor if self.is_input else -1 - self.tensor, self.place, self.start)


@dataclass(frozen=True)
class Buffer:
    """width: columns. inner > 0: an output of shape [..., inner, width / inner]."""

    width: int
    inner: int = 0
    is_output: bool = True


@dataclass(frozen=True)
class Linear:
    """activation(x W^T + b) into `buffer` from `column` on. x: as many columns as W [N, K] has."""

    x: Source
    weight: int
    bias: int  # -1: none
    width: int
    buffer: int
    column: int
    activation: str = "none"

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Copy:
    x: Source
    width: int
    buffer: int
    column: int

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Mixture:
    """sum_e w_e expert_e, where w is the gate [..., E] or its softmax."""

    gate: Source
    experts: tuple[Source, ...]
    width: int
    softmax: bool
    buffer: int
    column: int

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.gate, *self.experts)


@dataclass(frozen=True)
class Product:
    """left * right, element by element."""

    left: Source
    right: Source
    width: int
    buffer: int
    column: int

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.left, self.right)


Step = Linear | Copy | Mixture | Product


@dataclass(frozen=True)
class Plan:
    """inner: of each input, whether its second last dim is indexed by `place` and no row."""

    inner: tuple[bool, ...]
    n_weights: int
    n_biases: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[Buffer]:
        return [buffer for buffer in self.buffers if buffer.is_output]


def encode(plan: Plan) -> str:
    """The words that the kernel reads (program.h), as a text."""
    words = [_VERSION, len(plan.inner), plan.n_weights, plan.n_biases, len(plan.buffers), len(plan.steps)]
    words += map(int, plan.inner)
    for buffer in plan.buffers:
        words += (int(buffer.is_output), buffer.width, buffer.inner)
    for level, step in leveled(plan):
        body: tuple[int, ...]
        match step:
            case Linear():
                rest = step.weight, step.bias, step.width, ACTIVATIONS.index(step.activation)
                op, body = 0, (*step.x.words, *rest)
            case Mixture():
                experts = [word for expert in step.experts for word in expert.words]
                op, body = 1, (*step.gate.words, len(step.experts), step.width, int(step.softmax), *experts)
            case Copy():
                op, body = 2, (*step.x.words, step.width)
            case Product():
                op, body = 3, (*step.left.words, *step.right.words, step.width)
        words += (op, 5 + len(body), level, step.buffer, step.column, *body)
    return text_of(words)


@functools.lru_cache(1024)
def decode(encoded: str) -> Plan:
    """The plan, its steps in levels."""
    take = iter(words_in(encoded)).__next__

    def source() -> Source:
        tensor, place, start = take(), take(), take()
        return Source(tensor if tensor >= 0 else -1 - tensor, place, start, tensor >= 0)

    def step() -> Step:
        op, _, _, buffer, column = (take() for _ in range(5))
        if op == 0:
            x, weight, bias, width, activation = source(), take(), take(), take(), ACTIVATIONS[take()]
            return Linear(x, weight, bias, width, buffer, column, activation)
        if op == 1:
            gate, count, width, softmax = source(), take(), take(), bool(take())
            return Mixture(gate, tuple(source() for _ in range(count)), width, softmax, buffer, column)
        if op == 2:
            return Copy(source(), take(), buffer, column)
        return Product(source(), source(), take(), buffer, column)

    version, n_inputs, n_weights, n_biases, n_buffers, n_steps = (take() for _ in range(6))
    assert version == _VERSION
    inner = tuple(bool(take()) for _ in range(n_inputs))
    outputs = [(bool(take()), take(), take()) for _ in range(n_buffers)]
    buffers = tuple(Buffer(width, inner, is_output) for is_output, width, inner in outputs)
    return Plan(inner, n_weights, n_biases, buffers, tuple(step() for _ in range(n_steps)))


def leveled(plan: Plan) -> list[tuple[int, Step]]:
    """The steps in levels: each comes after those that write the buffers it reads."""
    level_of: dict[int, int] = {}  # of a buffer: the highest of its writers
    leveled = []
    for step in plan.steps:
        read = [level_of.get(source.tensor, -1) for source in step.sources if not source.is_input]
        level = max(read, default=-1) + 1
        level_of[step.buffer] = max(level, level_of.get(step.buffer, 0))
        leveled.append((level, step))
    return sorted(leveled, key=lambda item: item[0])
