"""The steps of an index program: one handler per spelling, and the table of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.embedding_columns.index_combined import combined
from fxopt.patterns.embedding_columns.index_substitution import masked_fill, where
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, itself, name_of, operand
from fxopt.shape.calls import FILLS, WHERES, arguments_of
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of
from fxopt.shape.view_operators import CASTS

if TYPE_CHECKING:
    from fxopt.patterns.embedding_columns.index_program import IndexPrograms

aten = torch.ops.aten
Handler = Callable[["IndexPrograms", Node], IndexValue | None]
_DIVISIONS = (Op.REMAINDER, Op.FMOD, Op.FLOOR_DIVIDE)
_SHIFTS = (Op.LSHIFT, Op.RSHIFT)


def _cast(programs: IndexPrograms, node: Node) -> IndexValue | None:
    source = node.args[0]
    assert isinstance(source, Node)
    if tensor_of(source) is None or node.meta["val"].device != source.meta["val"].device:
        return None
    if node.meta["val"].is_complex():
        return None
    return programs.then(node, source)


def _by_number(programs: IndexPrograms, node: Node, op: Op, source: object, number: Number | None) -> IndexValue | None:
    """A step with a constant, as the dtype of its result holds it."""
    dtype = node.meta["val"].dtype
    a = operand(dtype, number) if number is not None else None
    if a is None or not isinstance(source, Node):
        return None
    if (op in _DIVISIONS and a == 0) or (op in _SHIFTS and not 0 <= a < dtype.itemsize * 8):
        return None
    return programs.then(node, source, Step(Instr(op, name_of(dtype), a)))


def _scalar(op: Op, integers_only: bool = False, floats_only: bool = False) -> Handler:
    """value op constant, the constant being the second argument."""

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        is_float = node.meta["val"].dtype.is_floating_point
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or (integers_only if is_float else floats_only):
            return None
        return _by_number(programs, node, op, node.args[0], constant_of(node.args[1]))

    return handle


def _add(programs: IndexPrograms, node: Node) -> IndexValue | None:
    if constant_of(node.args[1]) is not None:
        return _scalar(Op.ADD)(programs, node)
    if constant_of(node.args[0]) is not None and not node.kwargs:
        return _flipped(Op.ADD)(programs, node)
    return combined(Op.ADD)(programs, node) or _add_offsets(programs, node)


def _add_offsets(programs: IndexPrograms, node: Node) -> IndexValue | None:
    """ids[B, F] + offsets[F]: every field's ids into its own range of one big table; or one number, of any shape."""
    source, offsets = node.args[:2]
    if not (isinstance(source, Node) and isinstance(offsets, Node)) or node.kwargs or tensor_of(offsets) is None:
        return None
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or offsets.meta["val"].dtype != dtype or not shape_of(node):
        return None
    vector = programs.describe(offsets)
    if vector.program:  # torch.arange(F) * rows: computed by torch, once per call
        vector = itself(offsets)
    if (number := constant_of(vector.base)) is not None:
        return _by_number(programs, node, Op.ADD, source, number)
    fields = static(shape_of(node)[-1])
    if len(shape_of(vector.base)) != 1 or fields is None or not vector.view.axes:
        return None
    if fields == 1:  # no dim of the ids is the field's then: the innermost one is that of the rows, or of their ids
        return None
    if not vector.view.axes[-1].parts or static(shape_of(vector.base)[0]) != fields:
        return None
    if static(vector.view.axes[-1].size) != fields or programs.describe(source).per_lane:
        return None
    return programs.then(node, source, Step(Instr(Op.ADD_TENSOR, name_of(dtype)), vector.base))


def _flipped(op: Op, integers_only: bool = False) -> Handler:
    """constant op value."""

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        if node.kwargs or (integers_only and node.meta["val"].dtype.is_floating_point):
            return None
        return _by_number(programs, node, op, node.args[1], constant_of(node.args[0]))

    return handle


def _sqrt(programs: IndexPrograms, node: Node) -> IndexValue | None:
    """Rounded correctly, as torch's on CUDA. On CPUs torch's is MKL's, an ulp off for one number in six."""
    return _unary(Op.SQRT)(programs, node) if node.meta["val"].is_cuda else None


def _either_way(op: Op, integers_only: bool = False) -> Handler:
    """Two values, of which one may be a constant."""
    scalar, flipped, both = _scalar(op, integers_only), _flipped(op, integers_only), combined(op)

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        left, right = map(constant_of, node.args[:2])
        return (scalar if right is not None else flipped if left is not None else both)(programs, node)

    return handle


def _not(programs: IndexPrograms, node: Node) -> IndexValue | None:
    """~x is -1 - x."""
    return _by_number(programs, node, Op.RSUB, node.args[0], -1)


def _sub(programs: IndexPrograms, node: Node) -> IndexValue | None:
    number = constant_of(node.args[1])
    if number is None:
        return _flipped(Op.RSUB)(programs, node) or combined(Op.RSUB)(programs, node)
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        return None
    return _by_number(programs, node, Op.ADD, node.args[0], -number)  # so for integers that wrap and for floats alike


def _rsub(programs: IndexPrograms, node: Node) -> IndexValue | None:
    if len(node.args) > 2 or node.kwargs:
        return None
    return _by_number(programs, node, Op.RSUB, node.args[0], constant_of(node.args[1]))


def _div_mode(programs: IndexPrograms, node: Node) -> IndexValue | None:
    if node.kwargs.get("rounding_mode") != "floor" or len(node.args) != 2:
        return None
    return _scalar(Op.FLOOR_DIVIDE, integers_only=True)(programs, node)


def _clamp(programs: IndexPrograms, node: Node) -> IndexValue | None:
    arguments = arguments_of(node)
    source, dtype = arguments["self"], node.meta["val"].dtype
    steps = []
    for key, op in (("min", Op.CLAMP_MIN), ("max", Op.CLAMP_MAX)):
        if (bound := arguments.get(key)) is None:
            continue
        a = operand(dtype, bound) if isinstance(bound, int | float) else None
        if a is None:
            return None
        steps.append(Step(Instr(op, name_of(dtype), a)))
    return programs.then(node, source, *steps) if isinstance(source, Node) else None


def _unary(op: Op) -> Handler:
    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        source, dtype = node.args[0], node.meta["val"].dtype
        rounding = op in (Op.FLOOR, Op.CEIL, Op.TRUNC)
        if not isinstance(source, Node):
            return None
        if rounding and not dtype.is_floating_point:
            return programs.then(node, source)
        if dtype in (torch.float16, torch.bfloat16, torch.bool):
            return None
        return programs.then(node, source, Step(Instr(op, name_of(dtype))))

    return handle


def _bucketize(programs: IndexPrograms, node: Node) -> IndexValue | None:
    return _search(programs, node, node.args[0], node.args[1], node.kwargs)


def _searchsorted(programs: IndexPrograms, node: Node) -> IndexValue | None:
    return _search(programs, node, node.args[1], node.args[0], node.kwargs)


def _search(programs: IndexPrograms, node: Node, source, boundaries, options) -> IndexValue | None:  # type: ignore[no-untyped-def]
    if not (isinstance(source, Node) and isinstance(boundaries, Node)) or options.get("sorter") is not None:
        return None
    if tensor_of(source) is None or tensor_of(boundaries) is None or len(shape_of(boundaries)) != 1:
        return None
    if boundaries.meta["val"].dtype != source.meta["val"].dtype or not same_shape(source, node):
        return None
    positional = node.args[3] if len(node.args) > 3 else False
    right = bool(options.get("right", positional)) or options.get("side") == "right"
    value = programs.describe(source)
    step = Step(Instr(Op.BUCKETIZE, name_of(node.meta["val"].dtype), int(right)), boundaries)
    return replace(value, program=(*value.program, step))


HANDLERS: dict[object, Handler] = {
    **dict.fromkeys(CASTS, _cast),
    aten.add.Tensor: _add,
    aten.add.Scalar: _scalar(Op.ADD),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sub),
    aten.rsub.Scalar: _rsub,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _either_way(Op.MUL)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor), _scalar(Op.DIV, floats_only=True)),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _div_mode),
    **dict.fromkeys(
        (aten.floor_divide.default, aten.floor_divide.Scalar), _scalar(Op.FLOOR_DIVIDE, integers_only=True)
    ),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _scalar(Op.REMAINDER, integers_only=True)),
    aten.fmod.Scalar: _scalar(Op.FMOD, integers_only=True),
    **dict.fromkeys((aten.clamp.default, aten.clip.default), _clamp),
    aten.clamp_min.default: _scalar(Op.CLAMP_MIN),
    aten.clamp_max.default: _scalar(Op.CLAMP_MAX),
    aten.bitwise_not.default: _not,
    **{getattr(aten, op.name.lower()).default: _unary(op) for op in (Op.ABS, Op.FLOOR, Op.CEIL, Op.TRUNC)},
    aten.sqrt.default: _sqrt,
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    **dict.fromkeys(WHERES, where),
    **dict.fromkeys(FILLS, masked_fill),
}
for _name, _op in {"and": Op.AND, "or": Op.OR, "xor": Op.XOR}.items():
    for _packet in (getattr(aten, f"bitwise_{_name}"), getattr(aten, f"__{_name}__")):
        HANDLERS |= {_packet.Scalar: _either_way(_op, True), _packet.Tensor: _either_way(_op, True)}
for _name, _op in {"left": Op.LSHIFT, "right": Op.RSHIFT}.items():
    for _overload in ("Tensor", "Tensor_Scalar"):
        HANDLERS[getattr(getattr(aten, f"bitwise_{_name}_shift"), _overload)] = _scalar(_op, integers_only=True)
    for _overload in ("Tensor", "Scalar"):
        HANDLERS[getattr(getattr(aten, f"__{_name[0]}shift__"), _overload)] = _scalar(_op, integers_only=True)
