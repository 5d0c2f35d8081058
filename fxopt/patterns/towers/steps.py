"""Steps on rows, and numbers for the columns that they compute."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node


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

    @property
    def reads(self) -> tuple[Run, ...]:
        return ()


@dataclass(frozen=True)
class LinearStep:
    x: tuple[Run, ...]
    weight: Node
    bias: Node | None
    width: int
    activation: str = "none"

    @property
    def reads(self) -> tuple[Run, ...]:
        return self.x


@dataclass(frozen=True)
class SoftmaxStep:
    """No step of a plan: its columns are known only to mixtures."""

    logits: tuple[Run, ...]

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

    def numbers(self, step: Step, width: int) -> Tensor:
        """The numbers of a step's columns, [width]; equal steps are one."""
        if step not in self._numbers:
            self.steps.append(step)
            self._starts.append(self._next)
            self._numbers[step] = torch.arange(self._next, self._next + width, device="cpu")
            self._next += width + 1
        return self._numbers[step]

    def of(self, number: int) -> int:
        """The step that computes a column."""
        return bisect.bisect_right(self._starts, number) - 1

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
