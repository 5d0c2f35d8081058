"""What each ATen operator is in steps: its tensor arguments, the dims of its result, and the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.pointwise.plan import Operand
from fxopt.patterns.pointwise.axes import Axes, Dims, Mismatch
from fxopt.patterns.pointwise.program import Program
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
_EXACT = 1 << 23  # up to here a float tells an integer from its neighbours


@dataclass(frozen=True)
class Call:
    """A node while its steps are written.

    values: by position, of the tensor arguments. dims: of those and of the result, in numbered axes.
    """

    node: Node
    program: Program
    values: dict[int, int]
    dims: dict[int, Dims]
    result: Dims

    def operand(self, position: int, default: float = 0.0) -> Operand:
        if position in self.values:
            return self.values[position]
        return float(argument(self.node, position, default))

    def do(self, op: str, *operands: Operand) -> int:
        return self.program.elementwise(op, *operands)


@dataclass(frozen=True)
class Rule:
    """shape: the dims of the result from those of the arguments; steps: the value of the result."""

    shape: Callable[[Node, Axes, dict[int, Dims]], Dims]
    steps: Callable[[Call], int]

    @property
    def broadcasts(self) -> bool:
        """Whether it works element by element, so that constant dims may be of any size."""
        return self.shape is _broadcast


def argument(node: Node, position: int, default: Any = None) -> Any:
    """An argument by position, given by keyword or not at all."""
    if position < len(node.args):
        return node.args[position]
    name = node.target._schema.arguments[position].name  # type: ignore[union-attr]
    return node.kwargs.get(name, default)


def tensors(node: Node) -> dict[int, Node]:
    """The tensor arguments by position; lists of tensors and unknown keywords count as none."""
    count = len(node.target._schema.arguments)  # type: ignore[union-attr]
    found = {position: argument(node, position) for position in range(count)}
    return {
        position: value
        for position, value in found.items()
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
    }


def rule_of(node: Node) -> Rule | None:
    """How a node is computed in steps; None where it is not, or not exactly as eager does."""
    rule = RULES.get(node.target)
    if rule is None:
        return None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
        return None
    if value.dtype not in (torch.float32, torch.bool):
        return None
    return rule if _dtypes_fit(node, value.dtype) and _numbers_fit(node) else None


def _dtypes_fit(node: Node, result: torch.dtype) -> bool:
    """Whether every argument converts to float, and back to bool, as eager computes it."""
    dtypes = {value.meta["val"].dtype for value in tensors(node).values()}
    integers = dtypes & {torch.uint8, torch.int32, torch.int64}
    if dtypes - integers - {torch.float32, torch.bool}:
        return False
    if result is torch.float32:
        return not (integers and node.target in _TYPED)
    if node.target in COMPARISONS:
        return not integers or torch.float32 in dtypes or _compares_exactly(node)
    return node.target in _TO_BOOL or (node.target in _LOGIC and dtypes == {torch.bool})


def _compares_exactly(node: Node) -> bool:
    """An integer with a number that a float tells from its neighbours."""
    return len(tensors(node)) == 1 and abs(argument(node, 1)) <= _EXACT


def _numbers_fit(node: Node) -> bool:
    """Whether everything but the tensors is known now, and of the kind that the rules know."""
    for position in range(len(node.target._schema.arguments)):  # type: ignore[union-attr]
        value = argument(node, position)
        if isinstance(value, Node) and not isinstance(value.meta.get("val"), torch.Tensor):
            return False
    if node.target is aten.pow.Tensor_Scalar:
        return argument(node, 1) in _EXPONENTS
    if node.target is aten.gelu.default:
        return argument(node, 1, "none") == "none"
    if node.target is aten.softplus.default:
        return argument(node, 1, 1) == 1 and argument(node, 2, 20) == 20
    return True


def _broadcast(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    return axes.broadcast(shape_of(node), dims.values())


def _elementwise(op: str, count: int = 2) -> Rule:
    return Rule(_broadcast, lambda call: call.do(op, *(call.operand(position) for position in range(count))))


def _with_alpha(op: str, flipped: bool = False) -> Rule:
    """a op alpha * b, or flipped b op alpha * a."""

    def steps(call: Call) -> int:
        a, b = call.operand(0), call.operand(1)
        first, second = (b, a) if flipped else (a, b)
        alpha = float(argument(call.node, 2, 1))
        if alpha != 1:
            second = call.do("mul", second, alpha) if isinstance(second, int) else second * alpha
        return call.do(op, first, second)

    return Rule(_broadcast, steps)


def _power(call: Call) -> int:
    x, exponent = call.values[0], float(argument(call.node, 1))
    if exponent in (2.0, 3.0):
        square = call.do("square", x)
        return square if exponent == 2 else call.do("mul", square, x)
    return call.do({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "copy"}[exponent], x)


def _clamp(call: Call) -> int:
    value: int = call.values[0]
    for position, op in ((1, "clamp_min"), (2, "clamp_max")):
        if position in call.values or argument(call.node, position) is not None:
            value = call.do(op, value, call.operand(position))
    return value


def _leaky_relu(call: Call) -> int:
    return call.do("leaky_relu", call.values[0], call.operand(1, 0.01))


def _masked_fill(call: Call) -> int:
    return call.do("where", call.values[1], call.operand(2), call.values[0])


def _cast(call: Call) -> int:
    """Numbers to float as they are; to bool, whether they are 0."""
    source = next(iter(tensors(call.node).values())).meta["val"].dtype
    result = call.node.meta["val"].dtype
    value = call.values[0]
    return call.do("ne", value, 0.0) if result is torch.bool and source is not torch.bool else call.do("copy", value)


def _lerp(call: Call) -> int:
    a, b = call.values[0], call.values[1]
    return call.do("add", a, call.do("mul", call.operand(2), call.do("sub", b, a)))


def _addcmul(op: str) -> Rule:
    def steps(call: Call) -> int:
        product = call.do(op, call.values[1], call.values[2])
        factor = float(argument(call.node, 3, 1))
        return call.do("add", call.values[0], product if factor == 1 else call.do("mul", product, factor))

    return Rule(_broadcast, steps)


def _reduced_dims(node: Node) -> list[int]:
    """The dims that a reduction or a softmax goes over; all of them where none is given."""
    rank = len(shape_of(tensors(node)[0]))
    dims = None if node.target is aten.sum.default else argument(node, 1)
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if dims else list(range(rank))


def _reduced(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    over = _reduced_dims(node)
    if node.target is not aten.sum.default and argument(node, 2, False):
        return tuple(None if dim in over else axis for dim, axis in enumerate(dims[0]))
    return tuple(axis for dim, axis in enumerate(dims[0]) if dim not in over)


def _over(call: Call) -> list[int]:
    return [axis for dim in _reduced_dims(call.node) if (axis := call.dims[0][dim]) is not None]


def _reduction(op: str) -> Rule:
    return Rule(
        _reduced,
        lambda call: (
            call.program.reduce(op, call.values[0], _over(call)) if _over(call) else call.do("copy", call.values[0])
        ),
    )


def _same(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    return dims[0]


def _shifted(call: Call) -> int:
    return call.do("sub", call.values[0], call.program.reduce("peak", call.values[0], _over(call)))


def _softmax(call: Call) -> int:
    powers = call.do("exp", _shifted(call))
    return call.do("div", powers, call.program.reduce("sum", powers, _over(call)))


def _log_softmax(call: Call) -> int:
    shifted = _shifted(call)
    return call.do("sub", shifted, call.do("log", call.program.reduce("sum", call.do("exp", shifted), _over(call))))


def _channels(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    """Of batch_norm and prelu: vectors over dim 1."""
    if node.target is aten.batch_norm.default and (argument(node, 5) or not {3, 4} <= dims.keys()):
        raise Mismatch  # batch statistics
    for position in dims.keys() - {0}:
        if len(dims[position]) != 1 or (dims[position][0] is not None and len(dims[0]) < 2):
            raise Mismatch
        if dims[position][0] is not None and axes.join(dims[0][1], dims[position][0]) is None:
            raise Mismatch
    return dims[0]


def _batch_norm(call: Call) -> int:
    """x * alpha + beta with both made of vectors, as torch computes it."""
    mean, variance = call.values[3], call.values[4]
    scale = call.do("rsqrt", call.do("add", variance, float(argument(call.node, 7))))
    if 1 in call.values:
        scale = call.do("mul", scale, call.values[1])
    shift = call.do("mul", call.do("neg", mean), scale)
    if 2 in call.values:
        shift = call.do("add", shift, call.values[2])
    return call.do("add", call.do("mul", call.values[0], scale), shift)


def _normalized(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    count = len(argument(node, 1))
    for position in dims.keys() - {0}:
        for left, right in zip(dims[0][-count:], dims[position], strict=True):
            axes.join(left, right)
    return dims[0]


def _layer_norm(call: Call) -> int:
    count = len(argument(call.node, 1))
    over = [axis for axis in call.dims[0][-count:] if axis is not None]
    if not over:
        raise Mismatch
    centered = call.do("sub", call.values[0], call.program.reduce("mean", call.values[0], over))
    variance = call.program.reduce("mean", call.do("square", centered), over)
    scale = call.do("rsqrt", call.do("add", variance, float(argument(call.node, 4, 1e-5))))
    result = call.do("mul", centered, scale)
    if 2 in call.values:
        result = call.do("mul", result, call.values[2])
    return call.do("add", result, call.values[3]) if 3 in call.values else result


def _one_column(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    """Of products with a single column, which are sums of products: linear to one output, matmul with a vector."""
    weight = dims[1]
    if node.target is aten.linear.default:
        if len(weight) != 2 or weight[0] is not None:
            raise Mismatch
        inner, result = weight[1], (*dims[0][:-1], None)
    elif len(weight) == 1:
        inner, result = weight[0], dims[0][:-1]
    elif len(weight) == 2 and weight[1] is None:
        inner, result = weight[0], (*dims[0][:-1], None)
    else:
        raise Mismatch
    size = static(axes.size(inner)) if inner is not None else None
    if len(dims[0]) < 2 or size is None or size > _LONGEST_DOT or dims[0][-1] is None:
        raise Mismatch
    axes.join(dims[0][-1], inner)
    return result


_LONGEST_DOT = 2048  # more products in a row than this is a matrix-vector product of its own


def _dot(call: Call) -> int:
    axis = call.dims[0][-1]
    assert axis is not None
    result = call.program.reduce("sum", call.do("mul", call.values[0], call.values[1]), [axis])
    return call.do("add", result, call.values[2]) if 2 in call.values else result


_UNARY = (
    "neg", "abs", "exp", "log", "log1p", "tanh", "sigmoid", "silu", "erf", "relu", "sqrt", "rsqrt", "reciprocal",
    "square", "gelu", "isnan", "softplus",
)  # fmt: skip
_BINARY = ("mul", "div")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_COMBINED = ("and", "or", "xor")
COMPARISONS = {getattr(getattr(aten, name), kind) for name in _COMPARED for kind in ("Scalar", "Tensor")}
_LOGIC = {
    *(getattr(aten, f"logical_{name}").default for name in _COMBINED),
    *(getattr(aten, f"bitwise_{name}").Tensor for name in _COMBINED),
    *(getattr(aten, f"__{name}__").Tensor for name in _COMBINED),
    aten.bitwise_not.default, aten.where.self,
}  # fmt: skip
_TO_BOOL = {aten.to.dtype, aten._to_copy.default, aten.logical_not.default, aten.isnan.default}
_TYPED = {aten.where.self, aten.maximum.default, aten.minimum.default}
PRODUCTS = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.mv.default}
_EXPONENTS = (2.0, 3.0, 0.5, -0.5, -1.0, 1.0)

RULES: dict[Any, Rule] = {
    **{getattr(aten, name).default: _elementwise(name, 1) for name in _UNARY},
    aten.logical_not.default: Rule(_broadcast, lambda call: call.do("eq", call.values[0], 0.0)),
    aten.add.Tensor: _with_alpha("add"),
    aten.add.Scalar: _with_alpha("add"),
    aten.sub.Tensor: _with_alpha("sub"),
    aten.sub.Scalar: _with_alpha("sub"),
    aten.rsub.Scalar: _with_alpha("sub", flipped=True),
    aten.rsub.Tensor: _with_alpha("sub", flipped=True),
    **{getattr(getattr(aten, name), kind): _elementwise(name) for name in _BINARY for kind in ("Tensor", "Scalar")},
    **{getattr(getattr(aten, name), kind): _elementwise(name) for name in _COMPARED for kind in ("Tensor", "Scalar")},
    **{getattr(aten, f"logical_{name}").default: _elementwise(name) for name in _COMBINED},
    **{getattr(aten, f"bitwise_{name}").Tensor: _elementwise(name) for name in _COMBINED},
    **{getattr(aten, f"__{name}__").Tensor: _elementwise(name) for name in _COMBINED},
    aten.maximum.default: _elementwise("maximum"),
    aten.minimum.default: _elementwise("minimum"),
    aten.clamp.default: Rule(_broadcast, _clamp),
    aten.clamp_min.default: _elementwise("clamp_min"),
    aten.clamp_max.default: _elementwise("clamp_max"),
    aten.leaky_relu.default: Rule(_broadcast, _leaky_relu),
    aten.prelu.default: Rule(_channels, lambda call: call.do("prelu", call.values[0], call.values[1])),
    aten.pow.Tensor_Scalar: Rule(_broadcast, _power),
    aten.bitwise_not.default: _elementwise("not", 1),
    aten.where.self: _elementwise("where", 3),
    aten.where.ScalarSelf: _elementwise("where", 3),
    aten.where.ScalarOther: _elementwise("where", 3),
    aten.masked_fill.Scalar: Rule(_broadcast, _masked_fill),
    aten.masked_fill.Tensor: Rule(_broadcast, _masked_fill),
    aten.addcmul.default: _addcmul("mul"),
    aten.addcdiv.default: _addcmul("div"),
    aten.lerp.Scalar: Rule(_broadcast, _lerp),
    aten.lerp.Tensor: Rule(_broadcast, _lerp),
    aten.to.dtype: Rule(_broadcast, _cast),
    aten._to_copy.default: Rule(_broadcast, _cast),
    aten.sum.default: _reduction("sum"),
    aten.sum.dim_IntList: _reduction("sum"),
    aten.mean.dim: _reduction("mean"),
    aten.amax.default: _reduction("amax"),
    aten.amin.default: _reduction("amin"),
    aten.softmax.int: Rule(_same, _softmax),
    aten._softmax.default: Rule(_same, _softmax),
    aten.log_softmax.int: Rule(_same, _log_softmax),
    aten.batch_norm.default: Rule(_channels, _batch_norm),
    aten.layer_norm.default: Rule(_normalized, _layer_norm),
    **{overload: Rule(_one_column, _dot) for overload in PRODUCTS},
}  # fmt: skip
