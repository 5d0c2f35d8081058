"""Steps on rows, and numbers for the columns that they compute."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.kernels.towers.plan import Activation
from fxopt.shape.calls import closure
from fxopt.shape.sizes import shape_of, static


@dataclass(frozen=True)
class Run:
    """Columns [column, column + width) of a step, by its number."""

    step: int
    column: int
    width: int


@dataclass(frozen=True)
class InputStep:
    """A tensor [B, W] or [B, F, W] that something else computes."""

    node: Node
    inner: int  # F, or 0

    def at(self, column: int) -> tuple[int, int]:
        """The inner row, or -1, and the place in it of a column that `Steps` has numbered."""
        return divmod(column, self._row + 1) if self.inner else (-1, column)

    @property
    def numbers(self) -> Tensor:
        """Of its columns, [F * W], from 0: rows are no neighbours, because no step reads beyond the end of one."""
        return torch.arange((self.inner or 1) * (self._row + 1), device="cpu").view(-1, self._row + 1)[:, :-1].flatten()

    @property
    def _row(self) -> int:
        width = static(shape_of(self.node)[-1])
        assert width is not None
        return width

    @property
    def reads(self) -> tuple[Run, ...]:
        return ()


@dataclass(frozen=True)
class LinearStep:
    x: tuple[Run, ...]
    weight: Node
    bias: Node | None
    width: int
    activation: Activation = "none"

    @property
    def reads(self) -> tuple[Run, ...]:
        return self.x


@dataclass(frozen=True)
class SoftmaxStep:
    """No step of a plan: its columns are known only to mixtures."""

    logits: tuple[Run, ...]

    @property
    def width(self) -> int:
        return sum(run.width for run in self.logits)

    @property
    def reads(self) -> tuple[Run, ...]:
        return self.logits


@dataclass(frozen=True)
class MixtureStep:
    gate: tuple[Run, ...]
    softmax: bool
    experts: tuple[Run, ...]
    width: int

    @property
    def reads(self) -> tuple[Run, ...]:
        return (*self.gate, *self.experts)


@dataclass(frozen=True)
class ProductStep:
    left: Run
    right: Run

    @property
    def width(self) -> int:
        return self.left.width

    @property
    def reads(self) -> tuple[Run, ...]:
        return (self.left, self.right)


Step = InputStep | LinearStep | SoftmaxStep | MixtureStep | ProductStep


class Steps:
    """All steps; each one's columns have consecutive numbers, and no two steps' numbers are neighbours."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._starts: list[int] = []
        self._numbers: dict[Step, Tensor] = {}
        self._next = 0

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]

    def numbers(self, step: Step) -> Tensor:
        """The numbers of a step's columns, [columns]; equal steps are one."""
        if step not in self._numbers:
            self.steps.append(step)
            self._starts.append(self._next)
            columns = step.numbers if isinstance(step, InputStep) else torch.arange(step.width, device="cpu")
            self._numbers[step] = columns + self._next
            self._next += int(columns[-1]) + 2
        return self._numbers[step]

    def of(self, number: int) -> int:
        """The step that computes a column."""
        return bisect.bisect_right(self._starts, number) - 1

    def needed(self, indices: Iterable[int]) -> list[int]:
        """These steps and all that they read, each behind what it reads: so they are numbered."""
        return sorted(closure(indices, lambda index: (run.step for run in self[index].reads)))

    def column(self, number: int) -> int:
        return number - self._starts[self.of(number)]

    def runs(self, numbers: Tensor) -> tuple[Run, ...]:
        """Columns in the order of `numbers`, those side by side in one step together."""
        flat = numbers.flatten().tolist()
        runs: list[Run] = []
        for at, number in enumerate(flat):
            if at and number == flat[at - 1] + 1:
                continue
            last = at + 1
            while last < len(flat) and flat[last] == flat[last - 1] + 1:
                last += 1
            step = self.of(number)
            runs.append(Run(step, number - self._starts[step], last - at))
        return tuple(runs)
