"""Writes the plan of a group: values, broadcasts, and the few fusions that pay in an interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxopt.kernels.pointwise.plan import Input, Operand, Output, Plan, Step

FrozenAxes = frozenset[int]


class Program:
    """Steps in order. Equal steps are one."""

    def __init__(self, axes: int, inputs: tuple[Input, ...]) -> None:
        self.axes, self.inputs = axes, inputs
        self.steps: list[Step] = []
        self._known: dict[object, int] = {}

    def axes_of(self, value: int) -> FrozenAxes:
        n = len(self.inputs)
        return self.inputs[value].axes if value < n else self.steps[value - n].axes

    def elementwise(self, op: str, *operands: Operand) -> int:
        """A step over all axes of its operands."""
        axes: FrozenAxes = frozenset().union(*(self.axes_of(v) for v in operands if isinstance(v, int)))
        return self._add(op, tuple(self.spread(operand, axes) for operand in operands), axes)

    def reduce(self, op: str, value: int, over: Iterable[int]) -> int:
        """One step for each run of neighbouring axes."""
        for run in reversed(_runs(sorted(over), sorted(self.axes_of(value)))):
            value = self._add(op, (value,), self.axes_of(value) - run)
        return value

    def spread(self, operand: Operand, axes: FrozenAxes) -> Operand:
        """The operand along all of `axes`."""
        if not isinstance(operand, int) or self.axes_of(operand) == axes:
            return operand
        return self._add("expand", (operand,), axes)

    def _add(self, op: str, operands: tuple[Operand, ...], axes: FrozenAxes) -> int:
        key = op, tuple(map(repr, operands)), axes  # value 2 is not the constant 2.0, nor 0.0 -0.0
        if key not in self._known:
            self.steps.append(Step(op, operands, axes))
            self._known[key] = len(self.inputs) + len(self.steps) - 1
        return self._known[key]

    def plan(self, outputs: tuple[Output, ...]) -> Plan:
        return _without_dead(_with_fma(Plan(self.axes, self.inputs, tuple(self.steps), outputs)))


def _runs(axes: list[int], present: list[int]) -> list[FrozenAxes]:
    """The axes in runs of neighbours among those that are present."""
    runs: list[list[int]] = []
    for axis in axes:
        if runs and present.index(axis) == present.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return [frozenset(run) for run in runs]


def _with_fma(plan: Plan) -> Plan:
    """a * b + c in one step where nothing else reads the product."""
    n, steps = len(plan.inputs), list(plan.steps)
    uses = [0] * (n + len(steps))
    for value in [v for step in steps for v in step.operands if isinstance(v, int)] + [o.value for o in plan.outputs]:
        uses[value] += 1
    for at, step in enumerate(steps):
        if step.op != "add":
            continue
        for product, other in (step.operands, step.operands[::-1]):
            if isinstance(product, int) and product >= n and uses[product] == 1 and steps[product - n].op == "mul":
                steps[at] = Step("fma", (*steps[product - n].operands, other), step.axes)
                break
    return replace(plan, steps=tuple(steps))


def _without_dead(plan: Plan) -> Plan:
    n = len(plan.inputs)
    alive = {output.value for output in plan.outputs}
    for at in reversed(range(len(plan.steps))):
        if n + at in alive:
            alive.update(v for v in plan.steps[at].operands if isinstance(v, int))
    number: dict[int, int] = {value: value for value in range(n)}
    kept: list[Step] = []
    for at, step in enumerate(plan.steps):
        if n + at not in alive:
            continue
        operands = tuple(number[v] if isinstance(v, int) else v for v in step.operands)
        number[n + at] = n + len(kept)
        kept.append(replace(step, operands=operands))
    outputs = tuple(replace(output, value=number[output.value]) for output in plan.outputs)
    return replace(plan, steps=tuple(kept), outputs=outputs)
