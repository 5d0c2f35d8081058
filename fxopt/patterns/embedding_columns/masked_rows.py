"""Rows of a lookup that a mask multiplies by 0, replaces by a constant, or lowers out of sight of a maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, name_of
from fxopt.patterns.embedding_columns.lookups import Lookup
from fxopt.patterns.embedding_columns.mask_axes import VIEWS, moved_axes
from fxopt.patterns.embedding_columns.masks import Atom, Mask, Prefix, Test, counting, mask_of
from fxopt.shape.calls import FILLS, WHERES
from fxopt.shape.sizes import same_shape, shape_of

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
class MaskedRows:
    """A lookup's rows under a mask. inner: the values on the way, which no edit may have changed."""

    lookup: Lookup
    masking: Masking
    inner: tuple[Node, ...]


@dataclass(frozen=True)
class _Choice:
    """rows where `mask` is 1, and elsewhere what `how` and `value` say."""

    rows: Node
    mask: Mask
    how: str
    value: Number = 0.0


def masked_rows(changed: Node, mode: str, lookups: dict[Node, Lookup], describe: Describe) -> MaskedRows | None:
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
    masking = masking_of(lookup.ids, choice.mask, axes, choice.how, choice.value, describe)
    return MaskedRows(lookup, masking, (changed, *choice.mask.nodes)) if masking else None


def masking_of(
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
    for rows, seen in (node.args[:2], node.args[1::-1])[: 1 + adds]:
        penalty, views = _behind_views(seen)
        if rows not in lookups or not isinstance(penalty, Node) or penalty.target is not aten.mul.Tensor:
            continue
        for factor, constant in (penalty.args[:2], penalty.args[1::-1]):
            number = constant_of(constant)
            mask = mask_of(factor) if isinstance(factor, Node) and number is not None else None
            value = None if number is None else _as(-number if adds else number, penalty)
            for view in views:
                mask = mask.through(view, partial(moved_axes, view)) if mask is not None else None
            if mask is not None and value is not None and abs(value) < 1e30:
                kept = replace(mask.invert(), nodes=mask.nodes | {penalty})
                return _Choice(rows, kept, "lowered", value)  # type: ignore[arg-type]
    return None


def _behind_views(value: object) -> tuple[object, list[Node]]:
    """What `value` is a view of, and the views on the way from there."""
    views: list[Node] = []
    while isinstance(value, Node) and value.target in VIEWS:
        views.insert(0, value)
        value = value.args[0]
    return value, views


def _as(number: Number, node: Node) -> Number:
    """A number as the dtype of `node` holds it."""
    return torch.tensor(number, dtype=torch.float64, device="cpu").to(node.meta["val"].dtype).item()


_CHOICES: dict[object, Callable[[Node, dict[Node, Lookup]], _Choice | None]] = {
    aten.mul.Tensor: _multiplied,
    **dict.fromkeys(FILLS, _filled),
    **dict.fromkeys(WHERES, _where),
    **dict.fromkeys((aten.sub.Tensor, aten.add.Tensor), _lowered),
}


_COUNTS = (aten.sum.dim_IntList, aten.count_nonzero.dim_IntList)


def counted_by(value: IndexValue, masking: Masking, ids: Node) -> frozenset[Node] | None:
    """The nodes of mask.sum(1), where `value` starts from that number of the lanes that count; else None."""
    call = value.base
    if call.target not in _COUNTS or call.kwargs.get("dtype") is not None:
        return None
    mask = mask_of(call.args[0]) if isinstance(call.args[0], Node) else None
    dims = call.args[1]
    if mask is None or call.meta["val"].dtype.itemsize < 4 or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    summed = int(dims[0])  # type: ignore[arg-type]
    rank = len(shape_of(call.args[0]))  # type: ignore[arg-type]
    lane = len(shape_of(ids)) - 1
    moved = [part.dim for axis in value.view.axes for part in axis.parts]
    if any(part.start or not part.whole for axis in value.view.axes for part in axis.parts):
        return None
    for axes in ((*range(lane + 1),), (*range(lane + 1), None), (*range(lane), None, lane)):
        if len(axes) == rank and axes[summed % rank] == lane and moved == sorted(moved):
            atoms = counting(mask, ids, axes)
            if atoms is not None and set(map(_condition, atoms)) == set(map(_condition, masking.atoms)):
                return mask.nodes | {call}
    return None


def _condition(atom: Atom) -> tuple:
    if isinstance(atom, Prefix):
        return atom.lengths, atom.first
    return atom.tensor, atom.compare, atom.constant
