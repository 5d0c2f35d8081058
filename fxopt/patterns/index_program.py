"""Index programs: what happens to an id between the model's input and the table it is looked up in.

Walking up from an id tensor, every operator that the columns kernel can run on the fly becomes a step of the
program or a change of the view; the first one that it cannot becomes the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Compare, Instr, Op
from fxopt.patterns import views_of
from fxopt.patterns.constants import Number, constant_of
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of
from fxopt.shape.views import View

aten = torch.ops.aten


@dataclass(frozen=True)
class Step:
    """One instruction, and the tensor node it reads (bucketize's boundaries, per-field offsets)."""

    instr: Instr
    operand: Node | None = None


@dataclass(frozen=True)
class IndexValue:
    """program(view of base): an elementwise program over a strided view of a tensor node."""

    base: Node
    view: View
    program: tuple[Step, ...] = ()

    @property
    def per_lane(self) -> bool:
        """Whether a step depends on the position along the last axis, which must then stay as it is."""
        return any(step.instr.op is Op.ADD_TENSOR for step in self.program)


class IndexPrograms:
    """Describes the id tensors of one graph; remembers what it has seen."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._seen: dict[Node, IndexValue] = {}

    def describe(self, node: Node) -> IndexValue:
        """The longest program that computes `node`; the empty one over `node` itself where nothing fits."""
        if node not in self._seen:
            self._seen[node] = self._step(node) or IndexValue(node, View.of(shape_of(node)))
        return self._seen[node]

    def edited(self, value: IndexValue) -> Node | None:
        """A tensor that the program reads and that the model edits in place, if there is one."""
        reads = [value.base, *(step.operand for step in value.program if step.operand is not None)]
        return next((node for node in reads if self._aliases.edited(node)), None)

    def _step(self, node: Node) -> IndexValue | None:
        if node.op != "call_function" or tensor_of(node) is None or self._aliases.edited(node):
            return None
        if (viewed := views_of.through(node)) is not None:
            return self._view(*viewed)
        handler = _HANDLERS.get(node.target)
        return handler(self, node) if handler else None

    def _view(self, source: Node, change: Callable[[View], View | None]) -> IndexValue | None:
        if tensor_of(source) is None:
            return None
        value = self.describe(source)
        view = change(value.view)
        if view is None or (value.per_lane and view.axes[-1:] != value.view.axes[-1:]):
            return None
        return replace(value, view=view)

    def then(self, node: Node, source: Node, *steps: Step) -> IndexValue | None:
        """`source`'s value, cast to `node`'s dtype if torch promotes it, then `steps`."""
        if tensor_of(source) is None or not same_shape(source, node):
            return None
        value, dtype = self.describe(source), node.meta["val"].dtype
        cast = () if dtype == source.meta["val"].dtype else (Step(Instr(Op.CAST, _name(dtype))),)
        return replace(value, program=(*value.program, *cast, *steps))


Handler = Callable[[IndexPrograms, Node], "IndexValue | None"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operand(dtype: torch.dtype, value: Number) -> Number | None:
    """A scalar as `dtype` holds it; None where torch would promote, overflow or refuse instead."""
    if dtype.is_floating_point:
        return float(value) if dtype in (torch.float32, torch.float64) else None
    if dtype == torch.bool or value != value or int(value) != value:
        return None
    limits = torch.iinfo(dtype)
    return int(value) if limits.min <= value <= limits.max else None


def _cast(programs: IndexPrograms, node: Node) -> IndexValue | None:
    source = node.args[0]
    assert isinstance(source, Node)
    if tensor_of(source) is None or node.meta["val"].device != source.meta["val"].device:
        return None
    if node.meta["val"].is_complex():
        return None
    return programs.then(node, source)


def _scalar(op: Op, integers_only: bool = False, floats_only: bool = False) -> Handler:
    """value op constant, the constant being the second argument."""

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        source, number = node.args[0], constant_of(node.args[1])
        dtype = node.meta["val"].dtype
        if not isinstance(source, Node) or number is None or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            return None
        if (integers_only and dtype.is_floating_point) or (floats_only and not dtype.is_floating_point):
            return None
        a = operand(dtype, number)
        if a is None or (integers_only and op is not Op.AND and a == 0):
            return None
        return programs.then(node, source, Step(Instr(op, _name(dtype), a)))

    return handle


def _add(programs: IndexPrograms, node: Node) -> IndexValue | None:
    if constant_of(node.args[1]) is not None:
        return _scalar(Op.ADD)(programs, node)
    if constant_of(node.args[0]) is not None and not node.kwargs:
        return _flipped(Op.ADD)(programs, node)
    return _add_offsets(programs, node)


def _add_offsets(programs: IndexPrograms, node: Node) -> IndexValue | None:
    """ids[B, F] + offsets[F]: every field's ids into its own range of one big table."""
    source, offsets = node.args[:2]
    if not (isinstance(source, Node) and isinstance(offsets, Node)) or node.kwargs or tensor_of(offsets) is None:
        return None
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or offsets.meta["val"].dtype != dtype or not shape_of(node):
        return None
    vector = programs.describe(offsets)
    if vector.program:  # torch.arange(F) * rows: computed by torch, once per call
        vector = IndexValue(offsets, View.of(shape_of(offsets)))
    fields = static(shape_of(node)[-1])
    if len(shape_of(vector.base)) != 1 or fields is None or not vector.view.axes:
        return None
    if not vector.view.axes[-1].parts or static(shape_of(vector.base)[0]) != fields:
        return None
    if static(vector.view.axes[-1].size) != fields or programs.describe(source).per_lane:
        return None
    return programs.then(node, source, Step(Instr(Op.ADD_TENSOR, _name(dtype)), vector.base))


def _flipped(op: Op) -> Handler:
    """constant op value."""

    def handle(programs: IndexPrograms, node: Node) -> IndexValue | None:
        number, source = constant_of(node.args[0]), node.args[1]
        dtype = node.meta["val"].dtype
        a = operand(dtype, number) if number is not None else None
        if a is None or not isinstance(source, Node) or node.kwargs:
            return None
        return programs.then(node, source, Step(Instr(op, _name(dtype), a)))

    return handle


def _mul(programs: IndexPrograms, node: Node) -> IndexValue | None:
    flipped = constant_of(node.args[0]) is not None
    return (_flipped(Op.MUL) if flipped else _scalar(Op.MUL))(programs, node)


def _sub(programs: IndexPrograms, node: Node) -> IndexValue | None:
    number, dtype = constant_of(node.args[1]), node.meta["val"].dtype
    if number is None:
        return _flipped(Op.RSUB)(programs, node)
    a = operand(dtype, -number)  # x - c is x + (-c), for integers that wrap and for floats alike
    source = node.args[0]
    if a is None or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or not isinstance(source, Node):
        return None
    return programs.then(node, source, Step(Instr(Op.ADD, _name(dtype), a)))


def _rsub(programs: IndexPrograms, node: Node) -> IndexValue | None:
    number, dtype = constant_of(node.args[1]), node.meta["val"].dtype
    a = operand(dtype, number) if number is not None else None
    if a is None or len(node.args) > 2 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    return programs.then(node, node.args[0], Step(Instr(Op.RSUB, _name(dtype), a)))


def _div_mode(programs: IndexPrograms, node: Node) -> IndexValue | None:
    if node.kwargs.get("rounding_mode") != "floor" or len(node.args) != 2:
        return None
    return _scalar(Op.FLOOR_DIVIDE, integers_only=True)(programs, node)


def _clamp(programs: IndexPrograms, node: Node) -> IndexValue | None:
    arguments = dict(zip(("self", "min", "max"), node.args, strict=False)) | dict(node.kwargs)
    source, dtype = arguments["self"], node.meta["val"].dtype
    steps = []
    for key, op in (("min", Op.CLAMP_MIN), ("max", Op.CLAMP_MAX)):
        if (bound := arguments.get(key)) is None:
            continue
        a = operand(dtype, bound) if isinstance(bound, int | float) else None
        if a is None:
            return None
        steps.append(Step(Instr(op, _name(dtype), a)))
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
        return programs.then(node, source, Step(Instr(op, _name(dtype))))

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
    step = Step(Instr(Op.BUCKETIZE, _name(node.meta["val"].dtype), int(right)), boundaries)
    return replace(value, program=(*value.program, step))


_COMPARES = {
    aten.eq.Scalar: Compare.EQ,
    aten.ne.Scalar: Compare.NE,
    aten.lt.Scalar: Compare.LT,
    aten.le.Scalar: Compare.LE,
    aten.gt.Scalar: Compare.GT,
    aten.ge.Scalar: Compare.GE,
}
_INVERSE = {
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
    if node.target not in _COMPARES or not isinstance(source, Node):
        return None
    dtype = source.meta["val"].dtype
    number = constant_of(node.args[1])
    constant = operand(dtype, number) if number is not None else None
    compare = _COMPARES[node.target]
    if constant is None or not same_shape(source, node):
        return None
    if inverted:  # not (NaN < c) holds and NaN >= c does not
        if dtype.is_floating_point and compare not in (Compare.EQ, Compare.NE):
            return None
        compare = _INVERSE[compare]
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
    save = Step(Instr(Op.SAVE, _name(tested.meta["val"].dtype)))
    where = Step(Instr(Op.WHERE, _name(dtype), bound, substitute, compare=compare))
    return replace(value, program=(*before.program, save, *between, where))


def _where(programs: IndexPrograms, node: Node) -> IndexValue | None:
    mask, first, second = node.args
    if constant_of(first) is not None:
        return _substitute(programs, node, mask, second, first, inverted=False)
    return _substitute(programs, node, mask, first, second, inverted=True)


def _masked_fill(programs: IndexPrograms, node: Node) -> IndexValue | None:
    kept, mask, constant = node.args
    return _substitute(programs, node, mask, kept, constant, inverted=False)


_HANDLERS: dict[object, Handler] = {
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.to.other: _cast,
    aten._to_copy.default: _cast,
    aten.type_as.default: _cast,
    aten.add.Tensor: _add,
    aten.add.Scalar: _scalar(Op.ADD),
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _scalar(Op.DIV, floats_only=True),
    aten.div.Scalar: _scalar(Op.DIV, floats_only=True),
    aten.true_divide.Tensor: _scalar(Op.DIV, floats_only=True),
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.floor_divide.default: _scalar(Op.FLOOR_DIVIDE, integers_only=True),
    aten.floor_divide.Scalar: _scalar(Op.FLOOR_DIVIDE, integers_only=True),
    aten.remainder.Scalar: _scalar(Op.REMAINDER, integers_only=True),
    aten.remainder.Tensor: _scalar(Op.REMAINDER, integers_only=True),
    aten.fmod.Scalar: _scalar(Op.FMOD, integers_only=True),
    aten.clamp.default: _clamp,
    aten.clip.default: _clamp,
    aten.clamp_min.default: _scalar(Op.CLAMP_MIN),
    aten.clamp_max.default: _scalar(Op.CLAMP_MAX),
    aten.bitwise_and.Scalar: _scalar(Op.AND, integers_only=True),
    aten.bitwise_and.Tensor: _scalar(Op.AND, integers_only=True),
    aten.__and__.Scalar: _scalar(Op.AND, integers_only=True),
    aten.abs.default: _unary(Op.ABS),
    aten.floor.default: _unary(Op.FLOOR),
    aten.ceil.default: _unary(Op.CEIL),
    aten.trunc.default: _unary(Op.TRUNC),
    aten.sqrt.default: _unary(Op.SQRT),
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
}
