"""Pooling of padded sequences: sum, mean and max over the lookups of one row, plain, masked or weighted.

The spellings, for rows [B, L, D] = table[ids], mask [B, L, 1] (or repeated over D) and length [B, 1]:

    rows.sum(1)    rows.mean(1)    rows.amax(1)    rows.max(1).values
    (rows * mask).sum(1)           torch.bmm(mask, rows)  with mask [B, 1, L]
    rows.masked_fill(~mask, 0).sum(1)              torch.where(mask, rows, 0).sum(1)
    rows.masked_fill(~mask, -1e9).amax(1)          (rows - (1 - mask) * 1e9).max(1).values
    any sum / length    any sum / (mask.sum(1) + 1e-8)    any sum / mask.sum(1).clamp(min=1)

A mask of ids or lengths (masks.py) becomes part of the pooling; any other factor is a weight per id.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.index_value import IndexValue, Step, name_of
from fxopt.patterns.lookups import Lookup
from fxopt.patterns.masks import Atom, Mask, Prefix, Test, counting, mask_of
from fxopt.shape.sizes import same, same_shape, shape_of, static, tensor_of

aten = torch.ops.aten
Describe = Callable[[Node], IndexValue]


@dataclass(frozen=True)
class Masking:
    """Which lanes count: where `ids` (the id program, with a KEEP per test) keeps them, before the prefix's length.

    how, value: as Column.masked and masked_value. atoms: all conditions, to recognize the same mask in a divisor.
    """

    ids: IndexValue
    prefix: Prefix | None
    how: str
    value: float
    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class Pooled:
    """anchor = the lookup's rows pooled over its last id axis.

    weights: a tensor [..., L] (or [..., L, 1], [..., 1, L]), one factor per id; divisor: one value per row.
    counted: the divisor is a program on the number of lanes that count.
    shared_grad: equal maxima share the gradient.
    inner: the values between the lookup and the anchor, which no edit may have changed.
    """

    anchor: Node
    lookup: Lookup
    mode: str
    weights: Node | None = None
    masking: Masking | None = None
    divisor: IndexValue | None = None
    divided_by: Node | None = None
    counted: bool = False
    shared_grad: bool = False
    inner: tuple[Node, ...] = ()


_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "max"}


def find_pooled(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """The pooling whose result `node` is, over one of the graph's `lookups`."""
    if node.op != "call_function":
        return None
    if node.target in _REDUCTIONS:
        return _reduced(node, node, _REDUCTIONS[node.target], lookups, describe)
    if node.target is operator.getitem and node.args[1] == 0:
        call = node.args[0]
        if isinstance(call, Node) and call.target is aten.max.dim and len(call.users) == 1:
            return _reduced(node, call, "max", lookups, describe)
    if node.target in (aten.bmm.default, aten.matmul.default):
        return _weighted_product(node, lookups, describe)
    if node.target in (aten.div.Tensor, aten.true_divide.Tensor):
        return _divided(node, lookups, describe)
    return None


def _reduced(anchor: Node, call: Node, mode: str, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    rows, dims = call.args[0], call.args[1] if len(call.args) > 1 else None
    if not isinstance(rows, Node) or tensor_of(rows) is None or call.kwargs.get("dtype") is not None:
        return None
    rank = len(shape_of(rows))
    dim = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    if not isinstance(dim, int) or rank < 3 or dim % rank != rank - 2:
        return None
    shared = call.target is aten.amax.default
    if rows in lookups:
        return None if lookups[rows].bag else Pooled(anchor, lookups[rows], mode, shared_grad=shared)
    masked = _masked(rows, mode, lookups, describe)
    if masked is not None:
        return replace(masked, anchor=anchor, shared_grad=shared)
    if mode == "sum" and rows.target is aten.mul.Tensor:
        return _weighted(anchor, rows, lookups)
    return None


@dataclass(frozen=True)
class _Choice:
    """rows where `mask` is 1, and elsewhere what `how` and `value` say."""

    rows: Node
    mask: Mask
    how: str
    value: Number = 0.0


def _masked(changed: Node, mode: str, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """Rows of which some are multiplied by 0, replaced by a constant or lowered out of sight."""
    finder = _CHOICES.get(changed.target)
    choice = finder(changed, lookups) if finder else None
    if choice is None or not same_shape(choice.rows, changed):
        return None
    lookup, dtype = lookups[choice.rows], choice.rows.meta["val"].dtype
    wide = dtype in (torch.float32, torch.float64)
    if changed.meta["val"].dtype != dtype or lookup.bag is not None:
        return None
    if mode != "max" and (choice.how == "lowered" or choice.value != 0):
        return None
    if mode == "max" and (choice.how == "scaled" or not wide):
        return None
    axes = (*range(len(shape_of(lookup.ids))), None)
    masking = _masking(lookup.ids, choice.mask, axes, choice.how, choice.value, describe)
    inner = (changed, *choice.mask.nodes)
    return Pooled(changed, lookup, mode, masking=masking, inner=inner) if masking else None


def _masking(
    ids: Node, mask: Mask, axes: tuple[int | None, ...], how: str, value: Number, describe: Describe
) -> Masking | None:
    atoms = counting(mask, ids, axes)
    if atoms is None:
        return None
    prefixes = [atom for atom in atoms if isinstance(atom, Prefix)]
    kept: IndexValue | None = describe(ids)
    for test in atoms:
        if isinstance(test, Test):
            kept = _with_test(kept, test, describe) if kept else None
    if kept is None or len(prefixes) > 1:
        return None
    return Masking(kept, prefixes[0] if prefixes else None, how, float(value), atoms)


def _with_test(value: IndexValue, test: Test, describe: Describe) -> IndexValue | None:
    """The id program with a KEEP where it holds the tested value; None where it never does."""
    tested = describe(test.tensor)
    if (tested.base, tested.view) != (value.base, value.view):
        return None
    at, left = 0, list(tested.program)
    while left:
        if at == len(value.program):
            return None
        step = value.program[at]
        if step.instr.op is not Op.KEEP and step != left.pop(0):
            return None
        at += 1
    instr = Instr(Op.KEEP, name_of(test.tensor.meta["val"].dtype), test.constant, compare=test.compare)
    return replace(value, program=(*value.program[:at], Step(instr), *value.program[at:]))


def _multiplied(node: Node, lookups: dict[Node, Lookup]) -> _Choice | None:
    for rows, other in (node.args[:2], node.args[1::-1]):
        mask = mask_of(other) if isinstance(other, Node) and rows in lookups else None
        if mask is not None:
            return _Choice(rows, mask, "scaled")  # type: ignore[arg-type]
    return None


def _filled(node: Node, lookups: dict[Node, Lookup]) -> _Choice | None:
    rows, left_out, value = node.args
    return _chosen(rows, left_out, value, lookups, inverted=True)


def _where(node: Node, lookups: dict[Node, Lookup]) -> _Choice | None:
    condition, first, second = node.args
    if first in lookups:
        return _chosen(first, condition, second, lookups, inverted=False)
    return _chosen(second, condition, first, lookups, inverted=True)


def _chosen(rows: object, mask: object, value: object, lookups: dict[Node, Lookup], inverted: bool) -> _Choice | None:
    number = constant_of(value)
    if rows not in lookups or number is None or not isinstance(mask, Node) or not isinstance(rows, Node):
        return None
    found = mask_of(mask)
    if found is None:
        return None
    return _Choice(rows, found.invert() if inverted else found, "filled", _as(number, rows))


def _lowered(node: Node, lookups: dict[Node, Lookup]) -> _Choice | None:
    """rows - (1 - mask) * 1e9, or rows + (1 - mask) * -1e9."""
    if node.kwargs or len(node.args) > 2:
        return None
    adds = node.target is aten.add.Tensor
    for rows, penalty in (node.args[:2], node.args[1::-1])[: 1 + adds]:
        if rows not in lookups or not isinstance(penalty, Node) or penalty.target is not aten.mul.Tensor:
            continue
        for factor, constant in (penalty.args[:2], penalty.args[1::-1]):
            number = constant_of(constant)
            mask = mask_of(factor) if isinstance(factor, Node) and number is not None else None
            if mask is not None and number is not None and abs(number) < 1e30:
                value = _as(-number if adds else number, penalty)
                kept = replace(mask.invert(), nodes=mask.nodes | {penalty})
                return _Choice(rows, kept, "lowered", value)  # type: ignore[arg-type]
    return None


def _as(number: Number, node: Node) -> Number:
    """A number as the dtype of `node` holds it."""
    return torch.tensor(number, dtype=torch.float64).to(node.meta["val"].dtype).item()


_CHOICES: dict[object, Callable[[Node, dict[Node, Lookup]], _Choice | None]] = {
    aten.mul.Tensor: _multiplied,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.sub.Tensor: _lowered,
    aten.add.Tensor: _lowered,
}


def _weighted(anchor: Node, product: Node, lookups: dict[Node, Lookup]) -> Pooled | None:
    """rows * weights, in either order."""
    for rows, weights in (product.args[:2], product.args[1::-1]):
        if isinstance(rows, Node) and rows in lookups and isinstance(weights, Node):
            factor = _one_per_id(weights, rows)
            if factor is None or lookups[rows].bag is not None:
                return None
            return Pooled(anchor, lookups[rows], "sum", factor, inner=(product,))
    return None


def _one_per_id(mask: Node, rows: Node) -> Node | None:
    """`mask` without its repetition over D: a float tensor [..., L, 1] that `rows` [..., L, D] is multiplied by."""
    while _repeats_last_axis(mask):
        mask = mask.args[0]  # type: ignore[assignment]
    if tensor_of(mask) is None or mask.meta["val"].dtype != rows.meta["val"].dtype:
        return None
    shape, full = shape_of(mask), shape_of(rows)
    if len(shape) != len(full) or static(shape[-1]) != 1:
        return None
    return mask if all(map(same, shape[:-1], full[:-1])) else None


def _repeats_last_axis(mask: Node) -> bool:
    source = mask.args[0] if mask.args else None
    if not isinstance(source, Node) or tensor_of(source) is None or tensor_of(mask) is None:
        return False
    repeats = (aten.expand.default, aten.repeat.default, aten.repeat_interleave.self_int, aten.expand_as.default)
    before, after = shape_of(source), shape_of(mask)
    casts = (aten.to.dtype, aten._to_copy.default)
    if mask.target in casts and source.meta["val"].dtype == mask.meta["val"].dtype:
        return True
    return (
        mask.target in repeats
        and len(before) == len(after)
        and static(before[-1]) == 1
        and all(map(same, before[:-1], after[:-1]))
    )


def _weighted_product(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """bmm(weights [B, 1, L], rows [B, L, D])."""
    weights, rows = node.args[:2]
    if not isinstance(rows, Node) or not isinstance(weights, Node) or rows not in lookups:
        return None
    shape, full = shape_of(weights), shape_of(rows)
    if len(shape) != 3 or len(full) != 3 or static(shape[1]) != 1 or not same(shape[0], full[0]):
        return None
    if weights.meta["val"].dtype != rows.meta["val"].dtype or lookups[rows].bag is not None:
        return None
    mask = mask_of(weights)
    masking = _masking(lookups[rows].ids, mask, (0, None, 1), "scaled", 0.0, describe) if mask else None
    if mask is not None and masking is not None:
        return Pooled(node, lookups[rows], "sum", masking=masking, inner=tuple(mask.nodes))
    return Pooled(node, lookups[rows], "sum", weights)


def _divided(node: Node, lookups: dict[Node, Lookup], describe: Describe) -> Pooled | None:
    """pooled / divisor, the divisor being one value per row."""
    pooled, divisor = node.args[:2]
    if not isinstance(pooled, Node) or not isinstance(divisor, Node) or tensor_of(divisor) is None:
        return None
    found = find_pooled(pooled, lookups, describe)
    if found is None or found.divisor is not None or len(pooled.users) > 1:
        return None
    shape, full = shape_of(divisor), shape_of(pooled)
    if len(shape) != len(full) or not all(map(same, shape[:-1], full[:-1])):
        return None
    if node.meta["val"].dtype != pooled.meta["val"].dtype or not _divides_exactly(divisor, pooled):
        return None
    value = describe(divisor)
    found = replace(found, anchor=node, divisor=value, divided_by=divisor, inner=(*found.inner, pooled))
    if found.masking is not None and _counts(value, found):
        return replace(found, counted=True) if static(shape[-1]) == 1 or same(shape[-1], full[-1]) else None
    return found if static(shape[-1]) == 1 else None


def _divides_exactly(divisor: Node, pooled: Node) -> bool:
    """Whether torch converts the divisor as the kernel does: a half would round an integer first."""
    dtype, by = pooled.meta["val"].dtype, divisor.meta["val"].dtype
    return by == dtype or dtype in (torch.float32, torch.float64)


_COUNTS = (aten.sum.dim_IntList, aten.count_nonzero.dim_IntList)


def _counts(value: IndexValue, pooled: Pooled) -> bool:
    """Whether `value` starts from the number of lanes that count: mask.sum(1)."""
    call = value.base
    if call.target not in _COUNTS or call.kwargs.get("dtype") is not None:
        return False
    mask = mask_of(call.args[0]) if isinstance(call.args[0], Node) else None
    dims = call.args[1]
    if mask is None or call.meta["val"].dtype.itemsize < 4 or not isinstance(dims, list | tuple) or len(dims) != 1:
        return False
    assert pooled.masking is not None
    summed = int(dims[0])  # type: ignore[arg-type]
    ids, rank = pooled.lookup.ids, len(shape_of(call.args[0]))  # type: ignore[arg-type]
    lane = len(shape_of(ids)) - 1
    moved = [part.dim for axis in value.view.axes for part in axis.parts]
    if any(part.start or not part.whole for axis in value.view.axes for part in axis.parts):
        return False
    for axes in ((*range(lane + 1),), (*range(lane + 1), None), (*range(lane), None, lane)):
        if len(axes) == rank and axes[summed % rank] == lane and moved == sorted(moved):
            atoms = counting(mask, ids, axes)
            if atoms is not None and set(map(_condition, atoms)) == set(map(_condition, pooled.masking.atoms)):
                return True
    return False


def _condition(atom: Atom) -> tuple:
    if isinstance(atom, Prefix):
        return atom.lengths, atom.first
    return atom.tensor, atom.compare, atom.constant
