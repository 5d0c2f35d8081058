"""Hashes in index programs: two programs of one value that meet again, as in `ids ^ (ids >> 16)`.

The first one's result waits in a register of the kernel, while the second one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import REGISTERS, Instr, Op
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, name_of
from fxopt.shape.sizes import same_shape, tensor_of

if TYPE_CHECKING:
    from fxopt.patterns.embedding_columns.index_program import IndexPrograms

_NAMING = (Op.SAVE, Op.SWAP, Op.COMBINE)


def combined(op: Op) -> Callable[[IndexPrograms, Node], IndexValue | None]:
    """left op right, both integers."""

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        left, right = node.args[:2]
        dtype = node.meta["val"].dtype
        if dtype.is_floating_point or dtype in (torch.bool, torch.complex64) or node.kwargs.get("alpha", 1) != 1:
            return None
        if not all(isinstance(side, Node) and _fits(side, node) for side in (left, right)):
            return None
        x, y = programs.describe(left), programs.describe(right)  # type: ignore[arg-type]
        if (x.base, x.view) != (y.base, y.view) or len(node.args) > 2:
            return None
        program = _joined(x.program, y.program, op, name_of(dtype))
        return None if program is None else replace(x, program=program)

    return handle


def _fits(side: Node, node: Node) -> bool:
    return tensor_of(side) is not None and same_shape(side, node)


def _joined(left: Sequence[Step], right: Sequence[Step], op: Op, dtype: str) -> tuple[Step, ...] | None:
    """What both begin with, then the rest of each; None where the rests need all registers."""
    common = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    same = next(n for n in range(common, -1, -1) if _is_whole(left[n:]) and _is_whole(right[n:]))
    first, second = left[same:], right[same:]
    inside = [step.instr for step in (*first, *second)]
    register = 1 + max((int(instr.b) for instr in inside if instr.op in _NAMING), default=-1)
    if register == REGISTERS:
        return None
    if first and not second and op is not Op.RSUB:
        first, second = second, first
    save, swap = Instr(Op.SAVE, dtype, b=register), Instr(Op.SWAP, dtype, b=register)
    combine = Instr(Op.COMBINE, dtype, int(op), register)
    swapped = (*first, Step(swap)) if first else ()
    return (*left[:same], Step(save), *swapped, *second, Step(combine))


def _is_whole(steps: Sequence[Step]) -> bool:
    """Whether they read no register that was saved before them."""
    saved = set()
    for instr in (step.instr for step in steps):
        if instr.op is Op.SAVE:
            saved.add(instr.b)
        elif (instr.op in _NAMING and instr.b not in saved) or (instr.op is Op.WHERE and 0 not in saved):
            return False
    return True
