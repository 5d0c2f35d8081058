"""Linear layers that are spelled otherwise, and products whose intermediate results are larger than they need to be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxopt.patterns.contractions.pairs import Axes, Roles, elements, is_full, linear_order, orders, spread_order
from fxopt.patterns.contractions.reading import Reader
from fxopt.patterns.contractions.terms import Factor, Term
from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import is_of_data, only_user
from fxopt.shape.sizes import is_tensor, same_shape, shape_of, static
from fxopt.shape.spelled import SPELLED, spelled
from fxopt.shape.view_operators import CASTS

aten = torch.ops.aten
_BIASED = {aten.conv1d.default, aten.conv2d.default}  # by one number for each output feature
_ELEMENTWISE = {aten.mul.Tensor, aten.sum.dim_IntList}
_WRITTEN_OUT = {*_ELEMENTWISE, aten.einsum.default}


def find_disguised_linears(search: Search) -> Iterator[Match | Reject]:
    """matmul(W, x[B, D, 1]), tensordot, einsum, addmm, conv1d of one position, (x * w).sum(-1), linear(x, W) + b."""
    reader = Reader(search.aliases)
    for node in search.graph.nodes:
        if node.target not in SPELLED or node.target is aten.mul.Tensor or _looks_up(node):
            continue
        for term in reader.terms(node, deepest=1):
            found = linear_order(term) if is_full(term) else None
            if found is not None and not _biased_elsewhere(node, term, found[2]):
                x, weight, roles = found
                bound = {"term": term, "x": x, "weight": weight, "roles": roles, "tensors": (x.node, weight.node)}
                match = _with_bias(node, bound, search.aliases)
                if node.target is not aten.linear.default or match.anchor is not node:
                    yield match
                break


def _biased_elsewhere(node: Node, term: Term, roles: Roles) -> bool:
    """A convolution of a single row may be read with its kernel as the rows: its bias belongs to those."""
    return node.target in _BIASED and _has_bias(node) and term.dims[1] != roles.right


def _looks_up(node: Node) -> bool:
    """one_hot(ids) @ table: a lookup, which is less work than a product."""
    source = node.args[0]
    while isinstance(source, Node) and source.target in CASTS:
        source = source.args[0]
    return isinstance(source, Node) and source.target is aten.one_hot.default


def _with_bias(node: Node, bound: dict, aliases: Aliases) -> Match:
    """The bias that the operator has, or that its only user adds."""
    call = spelled(node)
    assert call is not None
    if call.bias is not None:
        own = node.target in _BIASED or _is_bias(call.bias[0], node, bound)
        return Match(node, {**bound, "bias": call.bias[0], "adds": not own})
    user = only_user(node)
    if user is not None and user.target is aten.add.Tensor and not user.kwargs and not aliases.edited(node):
        others = [argument for argument in user.args if argument is not node]
        if len(others) == 1 and _is_bias(others[0], node, bound) and same_shape(user, node):
            return Match(user, {**bound, "bias": others[0], "adds": False})
    return Match(node, {**bound, "bias": None, "adds": False})


def _is_bias(bias: object, node: Node, bound: dict) -> bool:
    """Whether it has one number for each output feature, and nothing for each row."""
    if not is_tensor(bias) or bias.meta["val"].dtype != node.meta["val"].dtype:
        return False
    dims, shape = bound["term"].dims, shape_of(bias)
    if len(shape) > len(dims):
        return False
    for dim, size in zip(reversed(dims), reversed((1,) * (len(dims) - len(shape)) + tuple(shape)), strict=True):
        inside = bool(dim) and all(axis in bound["roles"].right for axis in dim)
        if inside != (static(size) != 1):
            return False
    return True


def find_contractions(search: Search) -> Iterator[Match | Reject]:
    """Products of two or three tensors, summed: a batched GEMM where a broadcast product was written out."""
    reader = Reader(search.aliases)
    seen: set[Node] = set()
    for node in reversed(search.graph.nodes):
        if node in seen or node.target not in SPELLED or node.target is aten.mul.Tensor or _has_bias(node):
            continue
        for term in reader.terms(node, deepest=3):
            if not is_full(term) or linear_order(term) is not None:
                continue
            best = _best(node, term, search.inference)
            spread = spread_order(term) if best is None and _is_written_out(term) else None
            if order := best or (spread and spread[:3]):
                seen.update(term.inside)
                bound = {"term": term, "order": order, "tensors": tuple(factor.node for factor in order)}
                yield Match(node, bound | {"spread": spread and spread[3]})
                break


def _has_bias(node: Node) -> bool:
    call = spelled(node)
    return call is not None and call.bias is not None


def _best(node: Node, term: Term, inference: bool) -> tuple[Factor, ...] | None:
    """The order of products that keeps the intermediate results small, if it is worth a try."""
    if len(term.factors) == 3:
        if not _is_written_out(term):
            return None  # GEMMs alone, in the order in which the model has them
        found = (way for way in orders(term) if inference or not _scales_a_weight(*way[:2]))
        ways = {_size(axes): (a, b, last) for a, b, last, axes in found}
        return ways[min(ways)] if ways and 2 * min(ways) <= _largest_inside(term) else None
    if len(term.factors) != 2:
        return None
    roles = Roles.of(term.factors[0].axes, term.factors[1].axes, term.axes)
    if not roles.inner:  # many layers of one number each are a tower on the CPU: 13 of width 16 take 18 us, not 54
        layer = node.target is aten.linear.default and node.meta["val"].is_cpu
        return term.factors if node.target not in _ELEMENTWISE and not layer else None
    if not (roles.left and roles.right):
        return None
    if _repeats(node, roles):
        rows = [any(static(axis.size) is None for axis in factor.axes) for factor in term.factors]
        return term.factors if rows[0] else term.factors[::-1]
    return term.factors if all(inner.target in _ELEMENTWISE for inner in term.inside) else None


def _scales_a_weight(a: Factor, b: Factor) -> bool:
    """Whether neither has rows, and one is of data, as x.mean(0) is: of no rows that is NaN, and so would be a gradient
    of the weight, which is 0 where the rows are scaled.
    """
    rows = any(static(axis.size) is None for axis in (*a.axes, *b.axes))
    return not rows and any(is_of_data(factor.node) for factor in (a, b))


def _is_written_out(term: Term) -> bool:
    """Whether some product of it is elementwise; an einsum of three tensors has one, or is as bad."""
    return len(term.inside) == 1 or any(inner.target in _WRITTEN_OUT for inner in term.inside[1:])


def _repeats(node: Node, roles: Roles) -> bool:
    """matmul(x[B, F, 1, D], w[F, D, E]), which copies w for each of B: more batches than the two share."""
    if node.target is not aten.matmul.default:
        return False
    rest = shape_of(node)[: max(len(shape_of(side)) for side in node.all_input_nodes) - 2]
    return elements(rest) > elements(axis.size for axis in roles.batch)


def _largest_inside(term: Term) -> int:
    """Elements of the largest intermediate result; an einsum multiplies from left to right."""
    if len(term.inside) == 1:
        *_, (_, _, _, axes) = orders(term)
        return _size(axes)
    return max(elements(shape_of(inner)) for inner in term.inside[1:])


def _size(axes: Axes) -> int:
    return elements(axis.size for axis in axes)
