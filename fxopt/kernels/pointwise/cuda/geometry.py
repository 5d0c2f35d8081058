"""How a launch divides its work: the rows of a block, the threads that share a sum, and where sums are kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..encode import plan_of
from ..plan import Plan
from .held import held_by_lanes
from .phases import VALUES
from .schedule import Phase, Schedule, schedule
from .source import parameters

THREADS = 256  # of a block, as steps.cuh says
_MOST_KEPT = 12288  # floats: the shared memory that every kernel may have
_MOST_BLOCKS = _MOST_COUNTED = (1 << 31) - (1 << 20)  # what 32 bits count, and one more block's items
_MOST_TOLD = 4096  # bytes of a kernel's parameters
_MOST_COPIES = 8  # of a plan in one kernel: each call has one, which reads its parameters as constants
_WARP = 32
# A thread has up to VALUES of the widest phase, so that it waits for several loads at once and has work in narrow
# phases. At least 256 blocks are left, or 2048 of programs with sums. On an H200 a gate over [2048, 50, 256] takes
# 126 us with one value, 95 with 2, 86 with 4 and 83 with 8; a round of MIND's routing (7 phases of 8192 rows of 50 x
# 16) 72, 50 and 42; seven phases of 2048 rows of 26 x 16 take 8 us with one value, and 11 with 2.
_FEWEST_BLOCKS = {False: 256, True: 2048}  # by whether there are sums
_ALONE = {True: 4, False: 16}  # numbers that a thread adds up by itself, of neighbours in memory or others: not tuned


@functools.lru_cache(maxsize=4096)
def scheduled(plan: str) -> Schedule:
    """The schedule of a plan's text."""
    return schedule(plan_of(plan))


@dataclass(frozen=True)
class Geometry:
    """lanes: by phase with a reduction; places: of the kept values, in floats.

    held: lanes that share a row in registers, and numbers of each; (0, 0) where a block goes through phases.
    fits: whether they have room in shared memory.
    """

    blocks: int
    rows: int
    block_rows: int
    lanes: tuple[int, ...]
    places: tuple[int, ...]
    kept: int
    held: tuple[int, int]
    fits: bool


@functools.lru_cache(maxsize=4096)
def geometry_of(plan: str, sizes: tuple[int, ...]) -> Geometry:
    """For axes of these sizes.

    Raises:
        RuntimeError: an extremum over no numbers.
    """
    made = scheduled(plan)
    _check_extrema(made, sizes)
    rows = math.prod(sizes[: made.outer])
    lanes = [_lanes(made, phase, sizes) if phase.over else 1 for phase in made.phases]
    widest = max(n * _within(made, phase.axes, sizes) for n, phase in zip(lanes, made.phases, strict=True))
    by_row = [0 in made.plan.axes_of(value) for value in made.kept]
    floats = [_within(made, made.plan.axes_of(value), sizes) for value in made.kept]
    a_row = sum(n for n, of_rows in zip(floats, by_row, strict=True) if of_rows)
    room = _MOST_KEPT - sum(floats) + a_row
    each = max(1, min(VALUES, rows * widest // (THREADS * _FEWEST_BLOCKS[made.reduces])))
    block_rows = max(1, min(-(-each * THREADS // max(1, widest)), room // max(1, a_row)))
    places = [0]
    for n, of_rows in zip(floats, by_row, strict=True):
        places.append(places[-1] + n * (block_rows if of_rows else 1))
    reducing = tuple(n for n, phase in zip(lanes, made.phases, strict=True) if phase.over)
    held = held_by_lanes(made, sizes)
    if held[0]:
        rows, block_rows, places[-1] = math.prod(sizes[:-1]), THREADS // held[0], 0
    blocks = -(-rows // block_rows)
    fits = places[-1] <= _MOST_KEPT and blocks <= _MOST_BLOCKS
    return Geometry(blocks, rows, block_rows, reducing, tuple(places[:-1]), places[-1], held, fits)


@dataclass(frozen=True)
class Launch:
    """Of calls of one plan: the blocks of each, and the most floats that one keeps.

    held: as in :class:`Geometry`, of all of them. fits: whether one launch takes them.
    """

    blocks: tuple[int, ...]
    kept: int
    held: tuple[int, int]
    fits: bool


@functools.lru_cache(maxsize=4096)
def launch_of(plan: str, sizes: tuple[tuple[int, ...], ...]) -> Launch:
    """For calls whose axes have these sizes.

    Raises:
        RuntimeError: an extremum over no numbers.
    """
    divided = [geometry_of(plan, of_call) for of_call in sizes]
    blocks = tuple(each.blocks for each in divided)
    alike = all(each.fits and each.held == divided[0].held for each in divided)
    fits = alike and sum(blocks) <= _MOST_BLOCKS and len(sizes) <= most_calls(plan)
    return Launch(blocks, max(each.kept for each in divided), divided[0].held, fits)


def most_calls(plan: str) -> int:
    """How many calls of a plan one launch takes."""
    told = _MOST_TOLD // (8 * (1 + sum(map(len, parameters(scheduled(plan)).values()))))
    return min(told, _MOST_COPIES)


def divisor(size: int) -> tuple[int, int]:
    """(magic, shift) by which steps.cuh divides numbers below 2^31."""
    shift = max(0, size - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - max(1, size)) // max(1, size) + 1) & 0xFFFFFFFF, shift


def _within(made: Schedule, axes: Sequence[int] | frozenset[int], sizes: Sequence[int]) -> int:
    """How many numbers a row has along these axes."""
    return math.prod(sizes[axis] for axis in made.inner(axes))


def _lanes(made: Schedule, phase: Phase, sizes: Sequence[int]) -> int:
    """Threads that share a sum, a power of two: more where neighbours read neighbours."""
    length = math.prod(sizes[axis] for axis in phase.over)
    last = _reads_along(made, phase)
    return min(_WARP, 1 << max(0, -(-length // _ALONE[last]) - 1).bit_length())


def _reads_along(made: Schedule, phase: Phase) -> bool:
    """Whether what a reduction adds up lies side by side: in an input that it reads, or in shared memory."""
    inputs = [made.plan.inputs[value] for value in made.needed(phase) if value < len(made.plan.inputs)]
    over = frozenset(phase.over)
    last = [[axis for axis in given.dims if axis is not None][-1] for given in inputs if given.axes & over]
    if not last:
        return not phase.axes or max(phase.axes) < min(phase.over)
    return any(axis in over for axis in last)


def _check_extrema(made: Schedule, sizes: Sequence[int]) -> None:
    plan, n = made.plan, len(made.plan.inputs)
    for phase in made.phases:
        if 0 in [sizes[axis] for axis in phase.over] and {plan.steps[v - n].op for v in phase.values} & {
            "amax",
            "amin",
        }:
            raise RuntimeError("fxopt.pointwise: an extremum over no numbers")


def sizes_of(inputs: Sequence[Tensor], plan: Plan) -> tuple[int, ...]:
    """The size of every axis.

    Raises:
        RuntimeError: inputs that do not fit the plan.
    """
    sizes: dict[int, int] = {}
    if len(inputs) != len(plan.inputs):
        raise RuntimeError(f"fxopt.pointwise: expected {len(plan.inputs)} inputs, found {len(inputs)}")
    for number, (tensor, given) in enumerate(zip(inputs, plan.inputs, strict=True)):
        if tensor.dim() != len(given.dims):
            raise RuntimeError(f"fxopt.pointwise: input {number} has {tensor.dim()} dims instead of {len(given.dims)}")
        for dim, (size, axis) in enumerate(zip(tensor.shape, given.dims, strict=True)):
            expected = 1 if axis is None else sizes.setdefault(axis, size)
            if size != expected:
                raise RuntimeError(
                    f"fxopt.pointwise: input {number} has size {size} at dim {dim} instead of {expected}"
                )
    return tuple(sizes[axis] for axis in range(plan.axes))


def is_wide(inputs: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether 32 bits do not count the elements of some value, or not those between the ends of an input."""
    if math.prod(max(1, size) for size in sizes) > _MOST_COUNTED:
        return True
    return any(
        sum(max(0, size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        > _MOST_COUNTED
        for tensor in inputs
    )
