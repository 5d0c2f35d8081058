"""A plan as the phases of a block of threads, which :mod:`.schedule` orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .schedule import Phase
from .writer import Writer

VALUES = 4  # that a thread has of a phase, at most, so that it waits for as many loads at once: see geometry.py
_UNROLLED = 12  # steps; of more than that a thread has enough in flight


class PhaseWriter(Writer):
    """Lines of a kernel whose blocks go through the phases of a schedule."""

    def lines(self) -> Iterator[str]:
        if self.schedule.kept:
            yield "  float* const kept = shared_floats();"
        for at, phase in enumerate(self.schedule.phases):
            yield from self._phase(at, phase)

    def _phase(self, at: int, phase: Phase) -> Iterator[str]:
        if phase.waits:
            yield "  __syncthreads();"
        lanes = f"c.lanes{at}" if phase.over else "1"
        kind = f"sums over axes {_listed(phase.over)}" if phase.over else "values"
        yield f"  {{  // {kind}, along axes {_listed(phase.axes)}"
        yield f"    const Index items = {_product([*self._rows(phase.axes), *self._sizes(phase.axes)])};"
        yield f"    #pragma unroll {1 if phase.over else VALUES}"
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
            yield f"float v{value} = {self.kind(value)}::start();"
        unrolled = len(self.schedule.needed(phase)) <= _UNROLLED
        yield "#pragma unroll 4" if unrolled else "#pragma unroll 1"
        yield f"for (Index at = item < items ? lane : length; at < length; at += c.lanes{at}) {{"
        yield from ("  " + line for line in self.decoded("at", phase.over))
        yield from ("  " + line for line in self._computed(phase))
        for value in phase.values:
            yield f"  v{value} = {self.kind(value)}::join(v{value}, {self.operand(self.step(value).operands[0])});"
        yield "}"
        for value in phase.values:
            mean = " / float(length)" if self.step(value).op == "mean" else ""
            yield f"v{value} = across<{self.kind(value)}>(v{value}, c.lanes{at}){mean};"
        yield "if (item >= items || lane > 0) continue;"
        for value in phase.values:
            yield from self._given(value)

    def _places(self, axes: Sequence[int]) -> Iterator[str]:
        """Where an item lies: its axes within a row, and those of its row."""
        inner = self.schedule.inner(axes)
        rows = [axis for axis in axes if axis not in inner]
        if not rows:
            yield from self.decoded("item", inner)
            return
        if inner:
            yield from self.decoded("item", inner, rest="row")
        yield f"[[maybe_unused]] const Index row_of_all = first + {'row' if inner else 'item'};"
        if not inner:
            yield "[[maybe_unused]] const Index row = item;"
        yield from self.decoded("row_of_all", rows)

    def _computed(self, phase: Phase) -> Iterator[str]:
        for value in self.schedule.needed(phase):
            if value < len(self.plan.inputs):
                yield f"const float v{value} = {self.read(value)};"
            elif value in self.schedule.kept and value not in phase.values:
                yield f"const float v{value} = kept[c.place{value} + {self._place(value)}];"
            else:
                yield f"const float v{value} = {self.called(value)};"

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


def _product(factors: Sequence[str]) -> str:
    return " * ".join(factors) or "1"


def _listed(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes))
