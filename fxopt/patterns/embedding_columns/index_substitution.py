"""Substitutions in index programs: where and masked_fill against constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Compare, Instr, Op
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, name_of, operand
from fxopt.shape.sizes import is_tensor, same_shape

if TYPE_CHECKING:
    from fxopt.patterns.embedding_columns.index_program import IndexPrograms

aten = torch.ops.aten

COMPARES = {getattr(aten, compare.name.lower()).Scalar: compare for compare in Compare}
_OPPOSITES = ((Compare.EQ, Compare.NE), (Compare.LT, Compare.GE), (Compare.GT, Compare.LE))
INVERSE = dict([*_OPPOSITES, *((b, a) for a, b in _OPPOSITES)])

Comparison = tuple[Compare, Number]
_NOT = (aten.logical_not.default, aten.bitwise_not.default)
_AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
_OR = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)


def _conditions(programs: IndexPrograms, node: object, inverted: bool) -> tuple[Node, tuple[Comparison, ...]] | None:
    """(x, comparisons of x with constants), of which one holds wherever the mask does (or does not, `inverted`)."""
    if not isinstance(node, Node) or programs.is_edited(node):
        return None
    if node.target in _NOT:
        return _conditions(programs, node.args[0], not inverted)
    if node.target in (_AND if inverted else _OR):
        left, right = (_conditions(programs, side, inverted) for side in node.args)
        return (left[0], left[1] + right[1]) if left and right and left[0] is right[0] else None
    comparison = _comparison(node, inverted)
    return comparison and (comparison[0], (comparison[1],))


def _comparison(node: Node, inverted: bool) -> tuple[Node, Comparison] | None:
    """x compare constant, or its negation."""
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
    return source, (compare, constant)


def _substitute(programs: IndexPrograms, node: Node, mask, kept, constant, inverted: bool) -> IndexValue | None:  # type: ignore[no-untyped-def]
    """Where the mask holds (or not, `inverted`): the constant, else `kept`."""
    conditions, number = _conditions(programs, mask, inverted), constant_of(constant)
    dtype = node.meta["val"].dtype
    if conditions is None or number is None or not is_tensor(kept):
        return None
    tested, comparisons = conditions
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
    wheres = [Step(Instr(Op.WHERE, name_of(dtype), bound, substitute, compare=op)) for op, bound in comparisons]
    return replace(value, program=(*before.program, save, *between, *wheres))


def where(programs: IndexPrograms, node: Node) -> IndexValue | None:
    mask, first, second = node.args
    if constant_of(first) is not None:
        return _substitute(programs, node, mask, second, first, inverted=False)
    return _substitute(programs, node, mask, first, second, inverted=True)


def masked_fill(programs: IndexPrograms, node: Node) -> IndexValue | None:
    kept, mask, constant = node.args
    return _substitute(programs, node, mask, kept, constant, inverted=False)
