"""A plan as the source of one CUDA kernel. steps.cuh holds what all of them share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..plan import Operand
from .schedule import Phase, Schedule

KERNEL = "_ZN5fxopt9generated16pointwise_kernelENS0_4CallE"  # as C++ calls it
_STEPS = Path(__file__).with_name("steps.cuh")
TYPES = {
    torch.float32: "float",
    torch.bool: "unsigned char",
    torch.uint8: "unsigned char",
    torch.int32: "int",
    torch.int64: "long long",
}
_KINDS = {"sum": "Sum", "mean": "Sum", "amax": "Most", "amin": "Least", "peak": "Most"}
_UNROLLED = 12  # steps; of more than that a thread has enough in flight


def parameters(schedule: Schedule) -> dict[str, list[str]]:
    """The names of the fields of the kernel's parameters, by type and in order."""
    plan = schedule.plan
    return {
        "const void*": [f"input{k}" for k in range(len(plan.inputs))],
        "void*": [f"output{k}" for k in range(len(plan.outputs))],
        "Index": [
            *("rows", "block_rows"),
            *(f"size{axis}" for axis in range(plan.axes)),
            *(f"stride{k}_{axis}" for k, given in enumerate(plan.inputs) for axis in given.dims if axis is not None),
        ],
        "unsigned": [*(f"magic{axis}" for axis in range(plan.axes)), *(f"shift{axis}" for axis in range(plan.axes))],
        "int": [
            *(f"lanes{at}" for at, phase in enumerate(schedule.phases) if phase.over),
            *(f"place{value}" for value in schedule.kept),
        ],
    }


def source(schedule: Schedule, dtypes: Sequence[torch.dtype], wide: bool) -> str:
    """The kernel for inputs of these dtypes; `wide` where 32 bits do not count their elements."""
    fields = (f"  {kind} {', '.join(names)};" for kind, names in _declared(schedule))
    written = _Writer(schedule, dtypes)
    return "\n".join([
        f"using Index = {'long long' if wide else 'int'};",
        _STEPS.read_text(),
        "namespace fxopt {\nnamespace generated {\n\nstruct Call {",
        *fields,
        "};\n",
        "__global__ void __launch_bounds__(kThreads) pointwise_kernel(const __grid_constant__ Call c) {",
        "  in_turn();",
        *(["  float* const kept = shared_floats();"] if schedule.kept else []),
        "  const int thread = int(threadIdx.x);",
        "  const Index first = Index(blockIdx.x) * c.block_rows;",
        "  const Index rows = c.rows - first < c.block_rows ? c.rows - first : c.block_rows;",
        *(line for at, phase in enumerate(schedule.phases) for line in written.phase(at, phase)),
        "}\n\n}  // namespace generated\n}  // namespace fxopt\n",
    ])  # fmt: skip


def _declared(schedule: Schedule) -> Iterator[tuple[str, list[str]]]:
    for kind, names in parameters(schedule).items():
        stars = [f"*{name}" for name in names] if kind.endswith("*") else names
        if names:
            yield kind.removesuffix("*"), stars


class _Writer:
    """Lines of one kernel."""

    def __init__(self, schedule: Schedule, dtypes: Sequence[torch.dtype]) -> None:
        self.schedule, self.plan, self.dtypes = schedule, schedule.plan, dtypes

    def phase(self, at: int, phase: Phase) -> Iterator[str]:
        if phase.waits:
            yield "  __syncthreads();"
        lanes = f"c.lanes{at}" if phase.over else "1"
        kind = f"sums over axes {_listed(phase.over)}" if phase.over else "values"
        yield f"  {{  // {kind}, along axes {_listed(phase.axes)}"
        yield f"    const Index items = {_product([*self._rows(phase.axes), *self._sizes(phase.axes)])};"
        yield f"    for (Index base = 0; base < items; base += kThreads / {lanes}) {{"
        yield f"      const Index item = base + thread / {lanes};"
        yield from ("      " + line for line in self._places(phase.axes))
        yield from ("      " + line for line in (self._reduced(at, phase) if phase.over else self._mapped(phase)))
        yield "    }"
        yield "  }"

    def _mapped(self, phase: Phase) -> Iterator[str]:
        yield "if (item >= items) continue;"
        yield from self._computed(phase)
        for value in phase.values:
            yield from self._given(value)

    def _reduced(self, at: int, phase: Phase) -> Iterator[str]:
        yield f"const int lane = thread % c.lanes{at};"
        yield f"const Index length = {_product(self._sizes(phase.over))};"
        for value in phase.values:
            yield f"float v{value} = {self._kind(value)}::start();"
        unrolled = len(self.schedule.needed(phase)) <= _UNROLLED
        yield "#pragma unroll 4" if unrolled else "#pragma unroll 1"
        yield f"for (Index at = item < items ? lane : length; at < length; at += c.lanes{at}) {{"
        yield from ("  " + line for line in self._decoded("at", phase.over))
        yield from ("  " + line for line in self._computed(phase))
        for value in phase.values:
            yield f"  v{value} = {self._kind(value)}::join(v{value}, {self._operand(self._step(value).operands[0])});"
        yield "}"
        for value in phase.values:
            mean = " / float(length)" if self._step(value).op == "mean" else ""
            yield f"v{value} = across<{self._kind(value)}>(v{value}, c.lanes{at}){mean};"
        yield "if (item >= items || lane > 0) continue;"
        for value in phase.values:
            yield from self._given(value)

    def _places(self, axes: Sequence[int]) -> Iterator[str]:
        """Where an item lies: its axes within a row, and those of its row."""
        inner = self.schedule.inner(axes)
        rows = [axis for axis in axes if axis not in inner]
        if not rows:
            yield from self._decoded("item", inner)
            return
        if inner:
            yield from self._decoded("item", inner, rest="row")
        yield f"[[maybe_unused]] const Index row_of_all = first + {'row' if inner else 'item'};"
        if not inner:
            yield "[[maybe_unused]] const Index row = item;"
        yield from self._decoded("row_of_all", rows)

    def _decoded(self, name: str, axes: Sequence[int], rest: str = "") -> Iterator[str]:
        """The axes that one number counts, the last one fastest; what is left of it is `rest`."""
        for place, axis in reversed(list(enumerate(axes))):
            if place == 0 and not rest:
                yield f"[[maybe_unused]] const Index a{axis} = {name};"
                continue
            left = rest if place == 0 else f"{name}_{axis}"
            yield f"[[maybe_unused]] const Index {left} = divided({name}, c.size{axis}, c.magic{axis}, c.shift{axis});"
            yield f"[[maybe_unused]] const Index a{axis} = {name} - {left} * c.size{axis};"
            name = left

    def _computed(self, phase: Phase) -> Iterator[str]:
        for value in self.schedule.needed(phase):
            if value < len(self.plan.inputs):
                yield f"const float v{value} = {self._read(value)};"
            elif value in self.schedule.kept and value not in phase.values:
                yield f"const float v{value} = kept[c.place{value} + {self._place(value)}];"
            else:
                step = self._step(value)
                operands = ", ".join(map(self._operand, step.operands))
                called = "copy" if step.op == "expand" else step.op
                yield f"const float v{value} = do_{called}({operands});"

    def _read(self, value: int) -> str:
        dims = self.plan.inputs[value].dims
        terms = [f"a{axis} * c.stride{value}_{axis}" for axis in dims if axis is not None]
        return f"read<{TYPES[self.dtypes[value]]}>(c.input{value}, {' + '.join(terms) or '0'})"

    def _place(self, value: int) -> str:
        """Of a kept value among those of all rows of the block."""
        axes = sorted(self.plan.axes_of(value))
        inner = self.schedule.inner(axes)
        place = "row" if len(inner) < len(axes) else "0"
        for axis in inner:
            place = f"a{axis}" if place == "0" else f"({place} * c.size{axis} + a{axis})"
        return f"int({place})"

    def _given(self, value: int) -> Iterator[str]:
        """What becomes of a phase's value."""
        if value in self.schedule.kept:
            yield f"kept[c.place{value} + int(item)] = v{value};"
        for number, output in enumerate(self.plan.outputs):
            if output.value == value:
                start = _product(["first", *self._sizes(self.schedule.inner(self.plan.axes_of(value)))])
                kind = "unsigned char" if output.boolean else "float"
                yield f"write(static_cast<{kind}*>(c.output{number}) + {start} + item, v{value});"

    def _rows(self, axes: Sequence[int]) -> list[str]:
        return ["rows"] if 0 in axes else []

    def _sizes(self, axes: Sequence[int]) -> list[str]:
        """Sizes of the axes that are none of the rows'."""
        return [f"c.size{axis}" for axis in self.schedule.inner(axes)]

    def _step(self, value: int):  # type: ignore[no-untyped-def]
        return self.plan.steps[value - len(self.plan.inputs)]

    def _kind(self, value: int) -> str:
        return _KINDS[self._step(value).op]

    def _operand(self, operand: Operand) -> str:
        return f"v{operand}" if isinstance(operand, int) else _number(operand)


def _number(value: float) -> str:
    rounded = ctypes.c_float(value).value
    if math.isfinite(rounded):
        return f"{rounded.hex()}f"
    return f"__uint_as_float({ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value:#x}u)"


def _product(factors: Sequence[str]) -> str:
    return " * ".join(factors) or "1"


def _listed(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes))
