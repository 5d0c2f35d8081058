"""A Plan as a string (an operator's argument, the same in every process), and as the words that the kernel reads.

Each value that must be kept gets a slot of scratch memory; slots are reused once their value was read last.
"""

from __future__ import annotations

import functools

import torch

from .checks import checked
from .plan import MOST_AXES, OPS, Input, Output, Plan, Step

VERSION = 0x46584F50_0101  # layout.h checks it
_DTYPES = {False: 6, True: 11}  # c10::ScalarType of float and bool
_NUMBERS = {name: number for number, name in enumerate(OPS)}


def text(plan: Plan) -> str:
    """One line: axes; inputs; steps; outputs."""
    fields = [str(plan.axes)]
    fields.append("/".join(_dims(given.dims) for given in plan.inputs))
    fields.append(
        "/".join(" ".join([step.op, _dims(tuple(sorted(step.axes))), *map(repr, step.operands)]) for step in plan.steps)
    )
    fields.append("/".join(f"{out.value} {_dims(out.dims)} {int(out.boolean)}" for out in plan.outputs))
    return ";".join(fields)


@functools.lru_cache(maxsize=4096)
def plan_of(line: str) -> Plan:
    """The plan of its text.

    Raises:
        ValueError: the text is not one of :func:`text`.
    """
    axes, inputs, steps, outputs = line.split(";")
    return checked(
        Plan(
            int(axes),
            tuple(Input(_axes(dims)) for dims in inputs.split("/")),
            tuple(_step(*step.split(" ")) for step in steps.split("/")),
            tuple(_output(*output.split(" ")) for output in outputs.split("/")),
        )
    )


def _dims(dims: tuple[int | None, ...]) -> str:
    return "." + "".join("_" if axis is None else str(axis) for axis in dims)


def _axes(dims: str) -> tuple[int | None, ...]:
    return tuple(None if axis == "_" else int(axis) for axis in dims[1:])


def _step(op: str, axes: str, *operands: str) -> Step:
    found = tuple(int(operand) if operand.isdigit() else float(operand) for operand in operands)
    return Step(op, found, frozenset(int(axis) for axis in axes[1:]))


def _output(value: str, dims: str, boolean: str) -> Output:
    return Output(int(value), _axes(dims), boolean == "1")


@functools.lru_cache(maxsize=4096)
def words_of(line: str) -> torch.Tensor:
    """The kernel's records, int64: the structs of layout.h."""
    plan = plan_of(line)
    slots, count = _slots(plan)
    words = [VERSION, plan.axes, plan.outer, len(plan.inputs), len(plan.steps), len(plan.outputs), count, 0]
    for given in plan.inputs:
        words += [_mask(given.axes), len(given.dims), *_padded(_place(axis, given.dims) for axis in range(plan.axes))]
    for step, slot in zip(plan.steps, slots, strict=True):
        operands = [operand if isinstance(operand, int) else -1 for operand in step.operands]
        constants = [_bits(operand) if isinstance(operand, float) else 0 for operand in step.operands]
        words += [_NUMBERS[step.op], _mask(step.axes), slot, *_three(operands), *_three(constants)]
    for output in plan.outputs:
        dims = _padded(-1 if axis is None else axis for axis in output.dims)
        words += [output.value, _DTYPES[output.boolean], len(output.dims), *dims]
    return torch.tensor(words, dtype=torch.int64, device="cpu")


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


def _place(axis: int, dims: tuple[int | None, ...]) -> int:
    return dims.index(axis) if axis in dims else -1


def _padded(numbers: object) -> list[int]:
    found = list(numbers)  # type: ignore[call-overload]
    return found + [-1] * (MOST_AXES - len(found))


def _three(numbers: list[int]) -> list[int]:
    return numbers + [-1] * (3 - len(numbers))


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
