"""The order in which a block of threads computes a plan on CUDA.

A block takes a few rows. Sums are made one level behind the other, and wait in shared memory for what reads them; so do
softmax weights and their like, which are dear. Everything else is computed again by each phase that reads it: memory
and launches are dearer than arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plan import REDUCTIONS, Operand, Plan

_DEAR = {
    "exp",
    "log",
    "log1p",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "erf",
    "softplus",
    "div",
    "sqrt",
    "rsqrt",
    "reciprocal",
}


@dataclass(frozen=True)
class Phase:
    """Values that one loop of a block gives, all along the same axes.

    over: the axes of a reduction, neighbours among those of what is reduced; none where no value is a reduction.
    waits: for all threads of the block, because it may read what others have kept.
    """

    values: tuple[int, ...]
    axes: tuple[int, ...]
    over: tuple[int, ...]
    waits: bool


@dataclass(frozen=True)
class Schedule:
    """outer: how many leading axes are the rows. kept: values that later phases read, from shared memory."""

    plan: Plan
    outer: int
    phases: tuple[Phase, ...]
    kept: tuple[int, ...]

    @property
    def alive(self) -> list[int]:
        """Values that an output needs, in order."""
        return _alive(self.plan)

    @property
    def reduces(self) -> bool:
        return any(phase.over for phase in self.phases)

    def inner(self, axes: Iterable[int]) -> list[int]:
        """Those of the axes that lie within a row."""
        return [axis for axis in sorted(axes) if axis >= self.outer]

    def needed(self, phase: Phase) -> list[int]:
        """What a phase computes up to its reduction, or to its end: values in order, from inputs and kept values on."""
        n, steps = len(self.plan.inputs), self.plan.steps
        read = [operand for value in phase.values for operand in steps[value - n].operands]
        unread: list[Operand] = read if phase.over else list(phase.values)
        found: set[int] = set()
        while unread:
            value = unread.pop()
            if isinstance(value, int) and value not in found:
                found.add(value)
                if value >= n and (value not in self.kept or value in phase.values):
                    unread += steps[value - n].operands
        return sorted(found)


def schedule(plan: Plan) -> Schedule:
    """The phases of a plan that :mod:`..checks` has accepted."""
    n, alive = len(plan.inputs), _alive(plan)
    levels, ends = _levels(plan, alive)
    outputs = dict.fromkeys(output.value for output in plan.outputs)
    last = max(levels.values()) + 1
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for value in dict.fromkeys([*ends, *outputs]):
        axes, over = plan.axes_of(value), frozenset[int]()
        if plan.steps[value - n].op in REDUCTIONS:
            over = plan.axes_of(int(plan.steps[value - n].operands[0])) - axes
        key = levels[value] if value in ends else last, tuple(sorted(axes)), tuple(sorted(over))
        groups.setdefault(key, []).append(value)
    read = {operand for value in alive if value >= n for operand in plan.steps[value - n].operands}
    kept = tuple(value for value in ends if value in read)
    phases, before = list[Phase](), 0
    for level, along, over_axes in sorted(groups):
        waits = bool(kept) and 0 < before < level
        phases.append(Phase(tuple(groups[level, along, over_axes]), along, over_axes, waits))
        before = level
    return Schedule(plan, _outer(plan, ends), tuple(phases), kept)


def _alive(plan: Plan) -> list[int]:
    """Values that an output needs, in order."""
    n, found = len(plan.inputs), {output.value for output in plan.outputs}
    for value in reversed(range(n, n + len(plan.steps))):
        if value in found:
            found.update(operand for operand in plan.steps[value - n].operands if isinstance(operand, int))
    return sorted(found)


def _levels(plan: Plan, alive: list[int]) -> tuple[dict[int, int], list[int]]:
    """How many phases lie behind each other on the way to a value, and the values that end one: reductions, and what
    is dear, made of reductions, and read once for each index of further axes."""
    n = len(plan.inputs)
    expanded = {
        plan.steps[value - n].operands[0] for value in alive if value >= n and plan.steps[value - n].op == "expand"
    }
    levels, dear, ends = dict.fromkeys(range(n), 0), [False] * n, list[int]()
    for value, step in enumerate(plan.steps, n):
        read = [operand for operand in step.operands if isinstance(operand, int)]
        levels[value] = max((levels[operand] for operand in read), default=0)
        dear.append(step.op in _DEAR or any(dear[operand] for operand in read))
        if value in alive and (step.op in REDUCTIONS or (value in expanded and dear[value] and levels[value] > 0)):
            ends.append(value)
            levels[value] += 1
            dear[value] = False
    return levels, ends


def _outer(plan: Plan, ends: list[int]) -> int:
    """The most leading axes that each of these values has all of, or none."""
    for outer in range(plan.outer, 1, -1):
        rows = frozenset(range(outer))
        if all(plan.axes_of(value) & rows in (rows, frozenset()) for value in ends):
            return outer
    return 1
