"""Repairs of empty bags: embedding_bag gives zeros for a bag without ids, in every mode."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.dead_check import CASTS, Checks, Dead
from fxopt.shape.range_operation import arguments_of
from fxopt.shape.sizes import Size, same, same_shape, shape_of, static, tensor_of

aten = torch.ops.aten
_BAGS = (aten.embedding_bag.padding_idx, aten.embedding_bag.default)
_WHY = "an empty bag is zeros already"


def find_repair(checks: Checks, node: Node) -> Dead | None:
    """where(count == 0, 0, bag), masked_fill(bag, count == 0, 0), bag * (count > 0).float()."""
    arguments = arguments_of(node)
    if node.target is aten.mul.Tensor:
        for kept, other in (("self", "other"), ("other", "self")):
            mask = arguments[other]
            if _is_bag(arguments[kept]) and isinstance(mask, Node):
                return _repaired(checks, node, kept, _uncast(mask), full=True)
        return None
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        kept, mask, filled, full = "self", arguments["mask"], arguments["value"], False
    else:
        full = _is_bag(arguments["self"])
        kept, other = ("self", "other") if full else ("other", "self")
        mask, filled = arguments["condition"], arguments[other]
    zero = constant_of(filled)
    if zero != 0 or math.copysign(1, zero) < 0 or not isinstance(mask, Node):
        return None
    return _repaired(checks, node, kept, mask, full)


def _repaired(checks: Checks, node: Node, kept: str, mask: Node, full: bool) -> Dead | None:
    """full: the mask holds where a bag has ids, else where it has none."""
    bag = arguments_of(node)[kept]
    if not _is_bag(bag) or not isinstance(bag, Node):
        return None
    test = _per_row(mask, shape_of(bag)[0])
    if test is None or any(checks.aliases.edited(one) for one in (node, bag, mask, test)):
        return None
    count = _counted(checks, test, full)
    call = bag.args[0]
    assert isinstance(call, Node)
    if count is None or not _counts_bags(_uncast(count), arguments_of(call)):
        return None
    return checks.pass_on(node, kept, _WHY, "the repair of empty bags", float_gradient=True)


def _is_bag(node: object) -> bool:
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 0:
        return False
    return isinstance(node.args[0], Node) and node.args[0].target in _BAGS


def _uncast(node: Node) -> Node:
    while node.target in CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _per_row(mask: Node, rows: Size) -> Node | None:
    """The [B] tensor behind a mask [B, 1] or [B, D] that says the same for a whole row."""
    while tensor_of(mask) is not None and len(shape_of(mask)) == 2:
        source = mask.args[0] if mask.args else None
        if not isinstance(source, Node) or tensor_of(source) is None:
            return None
        shape, before = shape_of(mask), shape_of(source)
        widened = mask.target in (aten.expand.default, aten.expand_as.default) and len(before) == 2
        columned = mask.target in _COLUMNS and len(before) == 1 and static(shape[1]) == 1
        inner = mask.target in (*CASTS, *_NOTS)
        if not (widened and static(before[1]) == 1 and same(before[0], shape[0])) and not columned and not inner:
            return _compared_rows(mask, rows)
        if inner:
            return None
        mask = source
    return mask if len(shape_of(mask)) == 1 and same(shape_of(mask)[0], rows) else None


_COLUMNS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default)
_NOTS = (aten.logical_not.default, aten.bitwise_not.default)


def _compared_rows(mask: Node, rows: Size) -> Node | None:
    """count.unsqueeze(1) == 0: the comparison itself, of [B, 1]."""
    return mask if static(shape_of(mask)[1]) == 1 and same(shape_of(mask)[0], rows) else None


def _counted(checks: Checks, test: Node, full: bool) -> Node | None:
    """The count that a test compares with 0, or with 1."""
    if test.target in _NOTS:
        return _counted(checks, test.args[0], not full)  # type: ignore[arg-type]
    if not isinstance(test.target, torch._ops.OpOverload) or not test.args or not isinstance(test.args[0], Node):
        return None
    count, name = test.args[0], test.target._schema.name
    bound = constant_of(test.args[1]) if len(test.args) > 1 else None
    exact, ordered = (("ne", 0), (("gt", 0), ("ge", 1))) if full else (("eq", 0), (("le", 0), ("lt", 1)))
    found = (name.removeprefix("aten::"), bound)
    natural = checks.values(count).intervals != () and checks.values(count).min >= 0
    if found != exact and not (natural and found in ordered):
        return None
    if len(shape_of(count)) == 2:
        return _per_row(count, shape_of(count)[0])
    return count


def _counts_bags(count: Node, bag: dict[str, object]) -> bool:
    """Whether `count` [B] is 0 only for bags without ids."""
    ids, offsets, ends = bag["indices"], bag["offsets"], bool(bag["include_last_offset"])
    assert isinstance(ids, Node) and isinstance(offsets, Node)
    if count.target is aten.diff.default:
        diff = arguments_of(count)
        if diff["self"] is not offsets or diff["n"] != 1 or diff["dim"] not in (-1, 0) or diff["prepend"] is not None:
            return False
        return diff["append"] is None if ends else _is_number_of(ids, diff["append"])
    if count.target is aten.sub.Tensor and ends:
        after, before = count.args[:2]
        return _is_slice(after, offsets, 1, None) and _is_slice(before, offsets, 0, -1) and not count.kwargs
    if offsets.target is aten.cat.default and ends:
        return _is_cumulated(offsets, count)
    return _counts_padded(count, ids, bag.get("padding_idx"))


def _is_number_of(ids: Node, tensor: object) -> bool:
    """A tensor of one element: how many ids there are."""
    total = shape_of(ids)[0]
    if not isinstance(tensor, Node) or tensor_of(tensor) is None or static(shape_of(tensor)[0]) != 1:
        return False
    number = constant_of(tensor)
    if number is not None:
        return static(total) == number
    value = tensor.args[1] if tensor.target is aten.full.default else None
    return isinstance(value, Node) and same(value.meta["val"], total)


def _is_slice(node: object, source: Node, start: int, stop: int | None) -> bool:
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return False
    given = arguments_of(node)
    last = given["end"]
    to_end = last is None or (isinstance(last, int) and last >= 2**62)
    return (given["start"] or 0) == start and given["step"] == 1 and (to_end if stop is None else last == stop)


def _is_cumulated(offsets: Node, lengths: Node) -> bool:
    """cat([zeros(1), cumsum(lengths)])."""
    parts = offsets.args[0]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return False
    zero, sums = parts
    if not isinstance(zero, Node) or constant_of(zero) != 0 or static(shape_of(zero)[0]) != 1:
        return False
    return isinstance(sums, Node) and sums.target is aten.cumsum.default and sums.args[0] is lengths


def _counts_padded(count: Node, ids: Node, padding: object) -> bool:
    """(rows != padding).sum(1), where the ids are those rows [B, L] one after the other, or the rows themselves."""
    if count.target is not aten.sum.dim_IntList or padding is None or count.args[1] not in ([1], [-1]):
        return False
    mask = _uncast(count.args[0])  # type: ignore[arg-type]
    if mask.target not in (aten.ne.Scalar, aten.ne.Tensor) or constant_of(mask.args[1]) != padding:
        return False
    rows = mask.args[0]
    if ids.target in (aten.reshape.default, aten.view.default):
        ids = ids.args[0]  # type: ignore[assignment]
    return rows is ids and isinstance(rows, Node) and len(shape_of(rows)) == 2 and same_shape(mask, rows)
