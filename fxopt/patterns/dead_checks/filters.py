"""Id filters that keep everything: `ids[ids >= 0]`, masked_select, and the positions that nonzero gives."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.patterns.core import Reject
from fxopt.patterns.dead_checks.proofs import Checks, Dead, Handler, Verdict, is_line, tested_by, told
from fxopt.shape.sizes import product, same, shape_of
from fxopt.shape.view_operators import RESHAPES, SAME, through
from fxopt.shape.view_steps import Select

aten = torch.ops.aten
_POSITIONS = {aten.nonzero.default, aten.nonzero_static.default, aten.argwhere.default}


def _index(checks: Checks, node: Node) -> Verdict:
    """x[..., mask] or x[..., positions]."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not isinstance(given[0][1], Node):
        return None
    dim, index = given[0]
    if index.meta["val"].dtype == torch.bool:
        return _filtered(checks, node, index, dim)
    return _selected(checks, node, index, dim)


def _masked_select(checks: Checks, node: Node) -> Verdict:
    mask = node.args[1]
    assert isinstance(mask, Node)
    return _filtered(checks, node, mask, 0) if len(shape_of(mask)) == len(shape_of(node.args[0])) else None  # type: ignore[arg-type]


def _index_select(checks: Checks, node: Node) -> Verdict:
    x, dim, index = node.args
    assert isinstance(x, Node) and isinstance(dim, int) and isinstance(index, Node)
    return _selected(checks, node, index, dim % max(1, len(shape_of(x))))


def _selected(checks: Checks, node: Node, index: Node, dim: int) -> Verdict:
    mask = _mask_behind(index)
    return _filtered(checks, node, mask, dim) if mask is not None else None


def _mask_behind(index: Node) -> Node | None:
    """The 1-D mask whose positions an index lists."""
    if len(shape_of(index)) != 1:
        return None
    while index.target in RESHAPES | SAME:
        index = index.args[0]  # type: ignore[assignment]
    source, step = through(index) or (index, None)
    if step == Select(1, 0):
        index = source
    elif index.target is operator.getitem and index.args[1] == 0:
        index = index.args[0]  # type: ignore[assignment]
    if index.target not in (*_POSITIONS, aten.where.default, aten.nonzero_numpy.default):
        return None
    mask = index.args[0]
    assert isinstance(mask, Node)
    return mask if len(shape_of(mask)) == 1 else None


def _filtered(checks: Checks, node: Node, mask: Node, dim: int) -> Verdict:
    """`node` keeps what the mask, over the dims of x from `dim` on, says."""
    x, last = node.args[0], dim + len(shape_of(mask)) - 1
    if not isinstance(x, Node) or not checks.same_kind(node, x) or mask.meta["val"].dtype != torch.bool:
        return None
    if not all(map(same, shape_of(x)[dim : last + 1], shape_of(mask))) or last < dim or last >= len(shape_of(x)):
        return None
    what = f"{told(x)}[{told(mask)}]"
    if checks.ranges.condition(mask) is not True:
        tested = tested_by(mask)
        reason = f": {checks.proof(tested)}" if tested is not None else ""
        return Reject(f"the filter {what} stays, its size depends on data{reason}", node)
    count = shape_of(node)[dim]
    shared = checks.may_be_shared(node, x) and is_line(x)
    merged = (dim, last) if last > dim else None
    equal = ((count, product(shape_of(mask))),)
    copied = None if shared else torch.contiguous_format
    return Dead(f"the filter {what} removed", checks.proof_of(mask, True), "self", copied, merged, equal)


HANDLERS: dict[object, Handler] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.masked_select.default: _masked_select,
}
