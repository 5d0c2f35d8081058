"""What every way of writing a plan as a kernel shares: how a value is read, and how it is computed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import torch

from ..plan import Operand, Step
from .schedule import Schedule

TYPES = {
    torch.float32: "float",
    torch.bool: "unsigned char",
    torch.uint8: "unsigned char",
    torch.int32: "int",
    torch.int64: "long long",
}
_KINDS = {"sum": "Sum", "mean": "Sum", "amax": "Most", "amin": "Least", "peak": "Most"}


class Writer:
    """Lines of one kernel, behind its first statements: `first` and `rows` are those of the block."""

    def __init__(self, schedule: Schedule, dtypes: Sequence[torch.dtype]) -> None:
        self.schedule, self.plan, self.dtypes = schedule, schedule.plan, dtypes

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def decoded(self, name: str, axes: Sequence[int], rest: str = "") -> Iterator[str]:
        """The axes that one number counts, the last one fastest; what is left of it is `rest`."""
        for place, axis in reversed(list(enumerate(axes))):
            if place == 0 and not rest:
                yield f"[[maybe_unused]] const Index a{axis} = {name};"
                continue
            left = rest if place == 0 else f"{name}_{axis}"
            yield f"[[maybe_unused]] const Index {left} = divided({name}, c.size{axis}, c.magic{axis}, c.shift{axis});"
            yield f"[[maybe_unused]] const Index a{axis} = {name} - {left} * c.size{axis};"
            name = left

    def read(self, value: int) -> str:
        """An input at the place that its axes name."""
        return f"read<{TYPES[self.dtypes[value]]}>(c.input{value}, {self.place(value)})"

    def place(self, value: int, without: int | None = None) -> str:
        """Where that is in the input; at the first index of an axis, if it is `without` that."""
        axes = [axis for axis in self.plan.inputs[value].dims if axis is not None and axis != without]
        return " + ".join(f"a{axis} * c.stride{value}_{axis}" for axis in axes) or "0"

    def called(self, value: int) -> str:
        """A step of its operands."""
        step = self.step(value)
        return f"do_{'copy' if step.op == 'expand' else step.op}({', '.join(map(self.operand, step.operands))})"

    def operand(self, operand: Operand) -> str:
        return f"v{operand}" if isinstance(operand, int) else _number(operand)

    def step(self, value: int) -> Step:
        return self.plan.steps[value - len(self.plan.inputs)]

    def kind(self, value: int) -> str:
        """Of a reduction, as steps.cuh names it."""
        return _KINDS[self.step(value).op]


def _number(value: float) -> str:
    rounded = ctypes.c_float(value).value
    if math.isfinite(rounded):
        return f"{rounded.hex()}f"
    return f"__uint_as_float({ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value:#x}u)"
