"""Towers and experts: a region of parallel linears and mixtures as one call of fxopt::towers."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Node

from fxopt.kernels.towers.op import OPERATORS, call_of
from fxopt.kernels.towers.plan import Buffer, Copy, Linear, Mixture, Plan, Product, Source, encode, leveled
from fxopt.kernels.towers.plan import Step as PlanStep
from fxopt.patterns.towers.regions import Region, find_towers
from fxopt.patterns.towers.steps import InputStep, LinearStep, MixtureStep, ProductStep, Run, Steps
from fxopt.rewrites.framework import MEASURED, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.strides import lies_alike


def replace_towers(editor: Editor, match: Match) -> Replacement:
    region: Region = match.bound["region"]
    builder = _Builder(region.steps)
    for node, numbers in region.outputs.items():
        builder.output(node, numbers)
    plan = builder.plan()
    editor.hoist([node for node in match.bound["late"] if not node < editor.point])
    encoded = encode(plan)
    state = list(builder.weights), list(builder.biases)
    call = editor.ours(OPERATORS, "towers", call_of(encoded), list(builder.inputs), *state, encoded)
    values: dict[Node, Node | None] = {}
    for index, node in enumerate(region.outputs):
        values[node] = _shaped(editor, editor.call(operator.getitem, call, index), node)
    linears = sum(isinstance(step, Linear) for _, step in plan.steps)
    mixtures = sum(isinstance(step, Mixture) for _, step in plan.steps)
    what = f"{linears} linears{f' and {mixtures} mixtures' if mixtures else ''} into {len(values)} tensors, one call"
    return Replacement(values, what, "each weight is read where it is, results are written where they are needed")


def _shaped(editor: Editor, made: Node, node: Node) -> Node:
    """[B, W] or [B, E, W] in the shape of the node, whose memory must be laid out alike."""
    made = editor.in_shape_of(node, made)
    if not lies_alike(node, made):
        raise Rejected("its memory would be laid out otherwise")
    return made


class _Builder:
    """Places the columns of steps in buffers, outputs first, and writes the steps down."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.inputs: dict[Node, int] = {}
        self.weights: dict[Node, int] = {}
        self.biases: dict[Node, int] = {}
        self._inner: list[bool] = []
        self._buffers: list[Buffer] = []
        self._placed: dict[int, tuple[int, int]] = {}  # buffer and column of a step
        self._joined: dict[tuple[Run, ...], Source] = {}  # operands from several steps, side by side in one buffer
        self._into: dict[int, list[tuple[int, Run]]] = {}  # by buffer: columns, and what is copied there

    def output(self, node: Node, numbers: Tensor) -> None:
        if static(shape_of(node)[0]) is not None:
            raise Rejected("the batch is not its first dim")
        trailing = [static(size) or 0 for size in shape_of(node)[1:]]
        inner = trailing[0] if len(trailing) == 2 else 0
        self._place(self._steps.runs(numbers), Buffer(numbers.numel(), inner))

    def _place(self, runs: tuple[Run, ...], buffer: Buffer) -> Source:
        """A buffer of its own for these columns, computed there or copied."""
        index, column = len(self._buffers), 0
        self._buffers.append(buffer)
        for run in runs:
            if self._is_free(run):
                self._placed[run.step] = (index, column)
            else:
                self._into.setdefault(index, []).append((column, run))
            column += run.width
        return Source(index, -1, 0, is_input=False)

    def _is_free(self, run: Run) -> bool:
        step = self._steps[run.step]
        computed = isinstance(step, LinearStep | MixtureStep | ProductStep) and run.width == step.width
        return computed and run.step not in self._placed

    def plan(self) -> Plan:
        """Everything that the outputs need, back to the inputs."""
        needed = self._needed()
        for index in reversed(needed):  # whoever reads several steps side by side decides where they lie
            runs = self._side_by_side(index)
            if len(runs) > 1 and runs not in self._joined:
                self._joined[runs] = self._place(runs, Buffer(sum(run.width for run in runs), 0, False))
        for index in needed:
            if index not in self._placed:
                self._placed[index] = (len(self._buffers), 0)
                self._buffers.append(Buffer(self._steps[index].width, 0, False))  # type: ignore[union-attr]
        steps: list[PlanStep] = []
        for index in needed:  # each behind what it reads: so they are numbered
            runs = self._side_by_side(index)
            if runs in self._joined:
                steps += self._copied(self._joined[runs].tensor)
            steps.append(self._written(index))
        for buffer in list(self._into):
            steps += self._copied(buffer)
        return Plan(tuple(self._inner), len(self.weights), len(self.biases), tuple(self._buffers), leveled(steps))

    def _needed(self) -> list[int]:
        unread = [*self._placed, *(run.step for into in self._into.values() for _, run in into)]
        return [index for index in self._steps.needed(unread) if not isinstance(self._steps[index], InputStep)]

    def _copied(self, buffer: int) -> list[PlanStep]:
        return [Copy(buffer, column, run.width, self._source((run,))) for column, run in self._into.pop(buffer, [])]

    def _side_by_side(self, index: int) -> tuple[Run, ...]:
        """What a step reads as one row."""
        step = self._steps[index]
        return step.gate if isinstance(step, MixtureStep) else step.x if isinstance(step, LinearStep) else ()

    def _written(self, index: int) -> PlanStep:
        step, place = self._steps[index], self._placed[index]
        if isinstance(step, MixtureStep):
            experts = tuple(self._source((run,)) for run in step.experts)
            return Mixture(*place, step.width, self._source(step.gate), step.softmax, experts)
        if isinstance(step, ProductStep):
            return Product(*place, step.width, self._source((step.left,)), self._source((step.right,)))
        assert isinstance(step, LinearStep)
        weight = self.weights.setdefault(step.weight, len(self.weights))
        bias = -1 if step.bias is None else self.biases.setdefault(step.bias, len(self.biases))
        return Linear(*place, step.width, self._source(step.x), weight, bias, step.activation)

    def _source(self, runs: tuple[Run, ...]) -> Source:
        if runs in self._joined:
            return self._joined[runs]
        (run,) = runs
        step = self._steps[run.step]
        if not isinstance(step, InputStep):
            buffer, column = self._placed[run.step]
            return Source(buffer, -1, column + run.column, is_input=False)
        if step.node not in self.inputs:
            self.inputs[step.node] = len(self.inputs)
            self._inner.append(step.inner > 0)
        return Source(self.inputs[step.node], *step.at(run.column))


REWRITE = Rewrite(
    "towers",
    find_towers,
    replace_towers,
    why="before the repeated lanes, which would pack the same layers; before chains, which it takes where they branch",
    policy=MEASURED,
)
