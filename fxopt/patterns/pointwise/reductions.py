"""Operators that go over an axis in steps: reductions, softmax, norms, and products with a single column."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from fxopt.patterns.pointwise.axes import Axes, Dims, Mismatch
from fxopt.patterns.pointwise.rule import Call, Rule, argument, tensors
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
ROOTS = {aten.std.dim, aten.std.correction}
VARIANCES = ROOTS | {aten.var.dim, aten.var.correction}


def reduced_dims(node: Node) -> list[int]:
    """The dims that a reduction or a softmax goes over; all of them where none is given."""
    rank = len(shape_of(tensors(node)[0]))
    dims = None if node.target is aten.sum.default else argument(node, _position(node))
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if dims and rank else list(range(rank))  # of a number, torch takes dim 0


def _reduced(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    over = reduced_dims(node)
    if node.target is not aten.sum.default and argument(node, _keeps(node)):
        return tuple(None if dim in over else axis for dim, axis in enumerate(dims[0]))
    return tuple(axis for dim, axis in enumerate(dims[0]) if dim not in over)


def _position(node: Node) -> int:
    """Where its dims stand among the arguments."""
    return 2 if node.target is aten.linalg_vector_norm.default else 1


def _keeps(node: Node) -> int:
    """Where it stands whether it keeps them."""
    return _position(node) + (2 if node.target in VARIANCES else 1)


def _over(call: Call) -> list[int]:
    return [axis for dim in reduced_dims(call.node) if (axis := call.dims[0][dim]) is not None]


def reduction(op: str) -> Rule:
    return Rule(
        _reduced,
        lambda call: (
            call.program.reduce(op, call.values[0], _over(call)) if _over(call) else call.do("copy", call.values[0])
        ),
        reduced_dims,
    )


def norm_dims(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    if argument(node, 1) != 2 or argument(node, 4) is not None:
        raise Mismatch  # another norm than the root of squares, or in another dtype
    return _reduced(node, axes, dims)


def norm(call: Call) -> int:
    """The root of a sum of squares. Of zeros it has no gradient, where that of a root would be NaN."""
    squares, over = call.do("square", call.values[0]), _over(call)
    return _root(call, call.program.reduce("sum", squares, over) if over else squares)


def _root(call: Call, total: int) -> int:
    empty = call.do("eq", total, 0.0)
    return call.do("where", empty, 0.0, call.do("sqrt", call.do("where", empty, 1.0, total)))


def varying_dims(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    """Of a variance or its root: over a known number of more elements than are taken off."""
    if _degrees(node) is None:
        raise Mismatch
    return _reduced(node, axes, dims)


def _degrees(node: Node) -> float | None:
    """What the sum of squares is divided by."""
    shape = shape_of(tensors(node)[0])
    sizes = [static(shape[dim]) for dim in reduced_dims(node)]
    off = argument(node, 2)
    left = math.prod(size for size in sizes if size) - (1.0 if off is None else float(off))
    return left if all(sizes) and left > 0 else None


def variance(call: Call) -> int:
    """Around the mean, less what the mean was rounded by: torch sums up in double, and numbers may be far from 0. The
    root has no gradient where it is 0, as in torch."""
    over, divisor = _over(call), _degrees(call.node)
    if not over or divisor is None:
        raise Mismatch
    centered = call.values[0]
    for _ in range(2):
        centered = call.do("sub", centered, call.program.reduce("mean", centered, over))
    total = call.program.reduce("sum", call.do("square", centered), over)
    found = call.do("div", total, divisor)
    return _root(call, found) if call.node.target in ROOTS else found


def same(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    return dims[0]


def _shifted(call: Call) -> int:
    return call.do("sub", call.values[0], call.program.reduce("peak", call.values[0], _over(call)))


def softmax(call: Call) -> int:
    powers = call.do("exp", _shifted(call))
    return call.do("div", powers, call.program.reduce("sum", powers, _over(call)))


def log_softmax(call: Call) -> int:
    shifted = _shifted(call)
    return call.do("sub", shifted, call.do("log", call.program.reduce("sum", call.do("exp", shifted), _over(call))))


def channels(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    """Of batch_norm and prelu: vectors over dim 1."""
    if node.target is aten.batch_norm.default and (argument(node, 5) or not {3, 4} <= dims.keys()):
        raise Mismatch  # batch statistics
    for position in dims.keys() - {0}:
        if len(dims[position]) != 1 or (dims[position][0] is not None and len(dims[0]) < 2):
            raise Mismatch
        if dims[position][0] is not None and axes.join(dims[0][1], dims[position][0]) is None:
            raise Mismatch
    return dims[0]


def batch_norm(call: Call) -> int:
    """x * alpha + beta with both made of vectors, as torch computes it."""
    mean, variance = call.values[3], call.values[4]
    scale = call.do("rsqrt", call.do("add", variance, float(argument(call.node, 7))))
    if 1 in call.values:
        scale = call.do("mul", scale, call.values[1])
    shift = call.do("mul", call.do("neg", mean), scale)
    if 2 in call.values:
        shift = call.do("add", shift, call.values[2])
    return call.do("add", call.do("mul", call.values[0], scale), shift)


def normalized(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    count = len(argument(node, 1))
    for position in dims.keys() - {0}:
        for left, right in zip(dims[0][-count:], dims[position], strict=True):
            axes.join(left, right)
    return dims[0]


def layer_norm(call: Call) -> int:
    count = len(argument(call.node, 1))
    over = [axis for axis in call.dims[0][-count:] if axis is not None]
    if not over:
        raise Mismatch
    centered = call.do("sub", call.values[0], call.program.reduce("mean", call.values[0], over))
    variance = call.program.reduce("mean", call.do("square", centered), over)
    scale = call.do("rsqrt", call.do("add", variance, float(argument(call.node, 4))))
    result = call.do("mul", centered, scale)
    if 2 in call.values:
        result = call.do("mul", result, call.values[2])
    return call.do("add", result, call.values[3]) if 3 in call.values else result


def one_column(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
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


def dot(call: Call) -> int:
    axis = call.dims[0][-1]
    assert axis is not None
    result = call.program.reduce("sum", call.do("mul", call.values[0], call.values[1]), [axis])
    return call.do("add", result, call.values[2]) if 2 in call.values else result
