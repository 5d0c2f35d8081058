"""Substitutions in index programs: where and masked_fill against constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Compare, Instr, Op
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.index_value import IndexValue, Step, name_of, operand
from fxopt.shape.sizes import same_shape, tensor_of

if TYPE_CHECKING:
    from fxopt.patterns.index_program import IndexPrograms

aten = torch.ops.aten

COMPARES = {
    aten.eq.Scalar: Compare.EQ,
    aten.ne.Scalar: Compare.NE,
    aten.lt.Scalar: Compare.LT,
    aten.le.Scalar: Compare.LE,
    aten.gt.Scalar: Compare.GT,
    aten.ge.Scalar: Compare.GE,
}
INVERSE = {
    Compare.EQ: Compare.NE,
    Compare.NE: Compare.EQ,
    Compare.LT: Compare.GE,
    Compare.GE: Compare.LT,
    Compare.GT: Compare.LE,
    Compare.LE: Compare.GT,
}


def _condition(node: object, inverted: bool) -> tuple[Node, Compare, Number] | None:
    """(x, compare, constant) of a mask `x compare constant`, or of its negation."""
    if not isinstance(node, Node):
        return None
    if node.target in (aten.logical_not.default, aten.bitwise_not.default):
        return _condition(node.args[0], not inverted)
    source = node.args[0] if node.args else None
    if node.target not in COMPARES or not isinstance(source, Node):
        return None
    dtype = source.meta["val"].dtype
    number = constant_of(node.args[1])
    constant = operand(dtype, number) if number is not None else None
    compare = COMPARES[node.target]
    if constant is None or not same_shape(source, node):
        return None
    if inverted:  # not (NaN < c) holds and NaN >= c does not
        if dtype.is_floating_point and compare not in (Compare.EQ, Compare.NE):
            return None
        compare = INVERSE[compare]
    return source, compare, constant


def _substitute(programs: IndexPrograms, node: Node, mask, kept, constant, inverted: bool) -> IndexValue | None:  # type: ignore[no-untyped-def]
    """Where the mask holds (or not, `inverted`): the constant, else `kept`."""
    condition, number = _condition(mask, inverted), constant_of(constant)
    dtype = node.meta["val"].dtype
    if condition is None or number is None or not isinstance(kept, Node) or tensor_of(kept) is None:
        return None
    tested, compare, bound = condition
    substitute = operand(dtype, number)
    if substitute is None or kept.meta["val"].dtype != dtype or not same_shape(kept, node):
        return None
    before, value = programs.describe(tested), programs.describe(kept)
    split = len(before.program)
    if (before.base, before.view) != (value.base, value.view) or value.program[:split] != before.program:
        return None
    between = value.program[split:]
    if any(step.instr.op is Op.SAVE for step in between):
        return None
    save = Step(Instr(Op.SAVE, name_of(tested.meta["val"].dtype)))
    where = Step(Instr(Op.WHERE, name_of(dtype), bound, substitute, compare=compare))
    return replace(value, program=(*before.program, save, *between, where))


def where(programs: IndexPrograms, node: Node) -> IndexValue | None:
    mask, first, second = node.args
    if constant_of(first) is not None:
        return _substitute(programs, node, mask, second, first, inverted=False)
    return _substitute(programs, node, mask, first, second, inverted=True)


def masked_fill(programs: IndexPrograms, node: Node) -> IndexValue | None:
    kept, mask, constant = node.args
    return _substitute(programs, node, mask, kept, constant, inverted=False)
