"""A Plan as the words that the kernel reads, in a text (an operator's argument, the same in every process), and back.

Each value that must be kept gets a slot of scratch memory; slots are reused once their value was read last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from ..words import bits_of, float_of, text_of, words_in
from .plan import BINARY, MOST_AXES, OPS, REDUCTIONS, TERNARY, UNARY, Input, Operand, Output, Plan, Step

VERSION = 0x46584F50_0102  # layout.h checks it
_DTYPES = {False: 6, True: 11}  # c10::ScalarType of float and bool
_NUMBERS = {name: number for number, name in enumerate(OPS)}
_MOST_OPERANDS = 3
_OPERANDS = {name: n for n, names in enumerate((UNARY, BINARY, TERNARY), 1) for name in names}
_Take = Callable[[], int]


def text(plan: Plan) -> str:
    """The structs of layout.h: a header, inputs, steps, outputs."""
    slots, count = _slots(plan)
    words = [VERSION, plan.axes, plan.outer, len(plan.inputs), len(plan.steps), len(plan.outputs), count, 0]
    for given in plan.inputs:
        places = (given.dims.index(axis) if axis in given.dims else -1 for axis in range(plan.axes))
        words += [_mask(given.axes), len(given.dims), *_padded(places, MOST_AXES)]
    for step, slot in zip(plan.steps, slots, strict=True):
        operands = (operand if isinstance(operand, int) else -1 for operand in step.operands)
        constants = (bits_of(operand) if isinstance(operand, float) else 0 for operand in step.operands)
        words += [_NUMBERS[step.op], len(step.operands), _mask(step.axes), slot]
        words += [*_padded(operands, _MOST_OPERANDS), *_padded(constants, _MOST_OPERANDS)]
    for output in plan.outputs:
        axes = (-1 if axis is None else axis for axis in output.dims)
        words += [output.value, _DTYPES[output.boolean], len(output.dims), *_padded(axes, MOST_AXES)]
    return text_of(words)


@functools.lru_cache(maxsize=4096)
def plan_of(line: str) -> Plan:
    """The plan of its text.

    Raises:
        ValueError: the text is not one of :func:`text`.
    """
    words = iter(words_in(line))
    try:
        plan = _read(words.__next__)
    except (StopIteration, IndexError):
        plan = None
    if plan is None or next(words, None) is not None:
        raise ValueError("fxopt.pointwise: expected a plan made by text()")
    return _checked(plan)


def _read(take: _Take) -> Plan | None:
    version, axes, _, n_inputs, n_steps, n_outputs, _, _ = [take() for _ in range(8)]
    if version != VERSION:
        return None
    inputs = [_input(take) for _ in range(n_inputs)]
    steps = [_step(take) for _ in range(n_steps)]
    outputs = [_output(take) for _ in range(n_outputs)]
    return Plan(axes, tuple(inputs), tuple(steps), tuple(outputs))


def _input(take: _Take) -> Input:
    _, n, *places = [take() for _ in range(2 + MOST_AXES)]
    dims: list[int | None] = [None] * n
    for axis, place in enumerate(places):
        if place >= 0:
            dims[place] = axis
    return Input(tuple(dims))


def _step(take: _Take) -> Step:
    op, n, mask, _ = [take() for _ in range(4)]
    values, constants = ([take() for _ in range(_MOST_OPERANDS)] for _ in range(2))
    operands: list[Operand] = [
        float_of(constant) if value < 0 else value for value, constant in zip(values, constants, strict=True)
    ]
    return Step(OPS[op], tuple(operands[:n]), frozenset(axis for axis in range(MOST_AXES) if mask >> axis & 1))


def _output(take: _Take) -> Output:
    value, dtype, n, *axes = [take() for _ in range(3 + MOST_AXES)]
    return Output(value, tuple(None if axis < 0 else axis for axis in axes[:n]), dtype == _DTYPES[True])


def _slots(plan: Plan) -> tuple[list[int], int]:
    """Each step's slot, and how many there are; those of the inputs come first. Values without axis 0 may be made
    once for all rows, so theirs are never reused; nor are those of their expansions. Boolean outputs are copied out
    after the last step.
    """
    n = len(plan.inputs)
    copied = {output.value for output in plan.outputs if output.boolean}
    last = {operand: at for at, step in enumerate(plan.steps) for operand in step.operands if isinstance(operand, int)}
    kept = {value for value in range(n) if 0 not in plan.axes_of(value)}
    slots: list[int] = []
    free: list[int] = []
    count = n
    for at, step in enumerate(plan.steps):
        read = [operand for operand in step.operands if isinstance(operand, int)]
        if all(operand in kept for operand in read):
            kept.add(n + at)
        if free and n + at not in kept:
            slots.append(free.pop())
        else:
            slots.append(count)
            count += 1
        for operand in set(read):
            if last[operand] == at and operand >= n and operand not in kept | copied:
                free.append(slots[operand - n])
    return slots, count


def _mask(axes: frozenset[int]) -> int:
    return sum(1 << axis for axis in axes)


def _padded(numbers: Iterable[int], count: int) -> list[int]:
    found = list(numbers)
    return found + [-1] * (count - len(found))


def _checked(plan: Plan) -> Plan:
    """The plan itself, whose numbers the kernel trusts.

    Raises:
        ValueError: it is not one that a pattern makes.
    """
    _expect(0 < plan.axes <= MOST_AXES and bool(plan.inputs) and bool(plan.outputs), "axes, inputs and outputs")
    for given in plan.inputs:
        _expect(_are_axes(given.dims, plan), f"an input's axes, not {given.dims}")
    _expect(
        frozenset().union(*(given.axes for given in plan.inputs)) == frozenset(range(plan.axes)), "inputs of all axes"
    )
    for number, step in enumerate(plan.steps):
        _check_step(plan, len(plan.inputs) + number, step)
    values = range(len(plan.inputs), len(plan.inputs) + len(plan.steps))
    for output in plan.outputs:
        _expect(output.value in values, f"a step's value as output, not {output.value}")
        axes = [axis for axis in output.dims if axis is not None]
        _expect(
            _are_axes(output.dims, plan) and axes == sorted(plan.axes_of(output.value)), "the axes of an output's value"
        )
        _expect(0 in axes, "outputs along the first axis")
    written = [output.value for output in plan.outputs if not output.boolean]
    _expect(len(set(written)) == len(written), "a value as one output")
    return plan


def _check_step(plan: Plan, number: int, step: Step) -> None:
    read = [operand for operand in step.operands if isinstance(operand, int)]
    _expect(all(0 <= operand < number for operand in read), f"{step.op} to read what is made before it")
    if step.op in _OPERANDS:
        _expect(len(step.operands) == _OPERANDS[step.op], f"another number of operands for {step.op}")
        _expect(all(plan.axes_of(operand) == step.axes for operand in read), f"operands of {step.op} with its own axes")
        return
    _expect(step.op in (*REDUCTIONS, "expand") and len(read) == len(step.operands) == 1, f"an operator, not {step.op}")
    axes = plan.axes_of(read[0])
    if step.op == "expand":
        _expect(axes < step.axes <= frozenset(range(plan.axes)), "an expansion to more axes")
        return
    over = sorted(axes - step.axes)
    between = axes & frozenset(range(over[0], over[-1] + 1)) if over else axes
    _expect(step.axes < axes and 0 not in over and between == frozenset(over), f"{step.op} over neighbouring axes")


def _are_axes(dims: tuple[int | None, ...], plan: Plan) -> bool:
    axes = [axis for axis in dims if axis is not None]
    return len(set(axes)) == len(axes) and all(0 <= axis < plan.axes for axis in axes)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"fxopt.pointwise: expected {what}")
