"""Plans whose sums all run along one row: a few lanes of a warp hold it in registers, and read it from memory once.

Layer norms, softmax over the last axis, vectors of length 1. As phases of a block (schedule.py) each sum reads the row
again, and the block waits between them: a layer norm of [12800, 32] takes 9 us on an H100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..plan import REDUCTIONS, Plan
from .schedule import Schedule
from .writer import Writer

_WARP, _MOST_EACH = 32, 32  # lanes, and numbers of a row that one of them holds
_MOST_REGISTERS = 64  # numbers of rows that a lane holds at a time
_EACH = 4  # numbers that a lane has before another one helps


def held_by_lanes(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, int]:
    """(lanes of a row, numbers that each holds), both powers of two; (0, 0) for plans of another kind."""
    plan = schedule.plan
    row = plan.axes - 1
    if not schedule.reduces or plan.outer != row or not row:
        return 0, 0
    padded = 1 << max(0, sizes[row] - 1).bit_length()
    lanes = min(_WARP, max(1, padded // _EACH))
    each = max(1, padded // lanes)
    fits = each <= _MOST_EACH and each * _rows_at_a_time(schedule) <= _MOST_REGISTERS
    return (lanes, each) if fits else (0, 0)


def _rows_at_a_time(schedule: Schedule) -> int:
    """How many values along the row are needed at one time."""
    plan = schedule.plan
    order = list(_in_order(plan, schedule.alive))
    ends = {value: len(order) for value in (output.value for output in plan.outputs)}
    for place, value in enumerate(order):
        for operand in _operands(plan, value):
            ends[operand] = max(ends.get(operand, 0), place)
    along = [(place, ends[value]) for place, value in enumerate(order) if _along(plan, value)]
    return max(sum(start <= place < end for start, end in along) for place in range(len(order)))


def _along(plan: Plan, value: int) -> bool:
    """Whether a row has several numbers of a value, and not the same one everywhere."""
    row, step = plan.axes - 1, value - len(plan.inputs)
    same = step >= 0 and plan.steps[step].op == "expand" and not _along(plan, _operands(plan, value)[0])
    return row in plan.axes_of(value) and not same


def _in_order(plan: Plan, alive: Sequence[int]) -> Iterator[int]:
    """Each value behind what it is made of; inputs where they are first read."""
    seen: set[int] = set()
    for value in alive:
        if value >= len(plan.inputs):
            for read in (*_operands(plan, value), value):
                if read not in seen:
                    seen.add(read)
                    yield read


def _operands(plan: Plan, value: int) -> list[int]:
    step = value - len(plan.inputs)
    return [operand for operand in plan.steps[step].operands if isinstance(operand, int)] if step >= 0 else []


class HeldWriter(Writer):
    """Lines of a kernel in which `lanes` threads share a row, `each` numbers to each."""

    def __init__(self, schedule: Schedule, dtypes: Sequence[torch.dtype], lanes: int, each: int) -> None:
        super().__init__(schedule, dtypes)
        self.lanes, self.each, self.row = lanes, each, schedule.plan.axes - 1

    def lines(self) -> Iterator[str]:
        yield f"  constexpr int kLanes = {self.lanes}, kEach = {self.each};"
        yield "  using Held = Row<kLanes, kEach>;"
        yield "  const int lane = thread % kLanes;"
        yield "  const Index row = thread / kLanes;"
        yield "  const Index row_of_all = first + (row < rows ? row : 0);"
        yield from ("  " + line for line in self.decoded("row_of_all", range(self.row)))
        for value in _in_order(self.plan, self.schedule.alive):
            yield from ("  " + line for line in self._made(value))
        yield "  if (row >= rows) return;"
        for number, output in enumerate(self.plan.outputs):
            yield from ("  " + line for line in self._given(number, output.value, output.boolean))

    def _made(self, value: int) -> Iterator[str]:
        along = self.row in self.plan.axes_of(value)
        if value >= len(self.plan.inputs) and self.step(value).op in REDUCTIONS:
            yield from self._reduced(value)
        elif along:
            yield f"float v{value}[kEach];"
            if value < len(self.plan.inputs) and self.dtypes[value] is torch.float32:
                stride, size = f"c.stride{value}_{self.row}", f"c.size{self.row}"
                start = self.place(value, without=self.row)
                yield f"Held::read(c.input{value}, {start}, {stride}, {size}, lane, v{value});"
                return
            yield from self._for_each(f"v{value}[k] = {self._computed(value)};")
        else:
            yield f"const float v{value} = {self._computed(value)};"

    def _computed(self, value: int) -> str:
        if value >= len(self.plan.inputs):
            return self.called(value)
        read = self.read(value)
        return f"a{self.row} < c.size{self.row} ? {read} : 0.0f" if self.row in self.plan.axes_of(value) else read

    def _reduced(self, value: int) -> Iterator[str]:
        kind, source = self.kind(value), self.operand(self.step(value).operands[0])
        yield f"float v{value} = {kind}::start();"
        yield from self._for_each(f"if (a{self.row} < c.size{self.row}) v{value} = {kind}::join(v{value}, {source});")
        mean = f" / float(c.size{self.row})" if self.step(value).op == "mean" else ""
        yield f"v{value} = across<{kind}>(v{value}, kLanes){mean};"

    def _given(self, number: int, value: int, boolean: bool) -> Iterator[str]:
        kind = "unsigned char" if boolean else "float"
        output = f"static_cast<{kind}*>(c.output{number}) + row_of_all"
        if self.row not in self.plan.axes_of(value):
            yield f"if (lane == 0) write({output}, v{value});"
        elif boolean:
            place = f"{output} * c.size{self.row} + a{self.row}"
            yield from self._for_each(f"if (a{self.row} < c.size{self.row}) write({place}, v{value}[k]);")
        else:
            yield f"Held::write({output} * c.size{self.row}, c.size{self.row}, lane, v{value});"

    def _for_each(self, line: str) -> Iterator[str]:
        yield "#pragma unroll"
        yield "for (int k = 0; k < kEach; k++) {"
        yield f"  [[maybe_unused]] const Index a{self.row} = Held::place(lane, k);"
        yield f"  {line}"
        yield "}"

    def operand(self, operand: int | float) -> str:
        along = isinstance(operand, int) and self.row in self.plan.axes_of(operand)
        return f"{super().operand(operand)}[k]" if along else super().operand(operand)
