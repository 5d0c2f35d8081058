"""Repairs of empty bags: embedding_bag gives zeros for a bag without ids, in every mode."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.dead_checks.proofs import Checks, Dead
from fxopt.shape.calls import FILLS, arguments_of, closure
from fxopt.shape.sizes import Size, is_tensor, same, shape_of, static, tensor_of
from fxopt.shape.view_operators import CASTS

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
    if node.target in FILLS:
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
    found, call = _per_row(mask, shape_of(bag)[0], full), bag.args[0]
    assert isinstance(call, Node)
    if found is None or any(map(checks.aliases.edited, (node, *_behind(node, call)))):
        return None
    count = _counted(checks, *found)
    if count is None or not _counts_bags(_uncast(count), arguments_of(call)):
        return None
    return checks.pass_on(node, kept, _WHY, "the repair of empty bags", float_gradient=True)


def _behind(repair: Node, call: Node) -> set[Node]:
    """What the repair and the bag are computed from, but for the rows."""
    starts = (*repair.all_input_nodes, *call.all_input_nodes)
    return closure(starts, lambda node: () if node is call else node.all_input_nodes)


def _is_bag(node: object) -> bool:
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 0:
        return False
    return isinstance(node.args[0], Node) and node.args[0].target in _BAGS


def _uncast(node: Node) -> Node:
    """The counts, or bools, that were cast to a dtype in which none but 0 becomes 0."""
    while node.target in CASTS and isinstance(source := node.args[0], Node):
        into, bools = node.meta["val"].dtype, source.meta["val"].dtype == torch.bool
        if not (bools or into.is_floating_point or into == torch.int64) or source.meta["val"].is_floating_point():
            break
        node = source
    return node


def _per_row(mask: Node, rows: Size, full: bool) -> tuple[Node, bool] | None:
    """The test of counts [B], or [B, 1], behind a mask [B, 1] or [B, D], and whether it holds where a bag has ids."""
    while mask.args and isinstance(source := mask.args[0], Node) and tensor_of(source) is not None:
        if mask.target in _NOTS:
            mask, full = source, not full
        elif _is_wider(mask, source, rows):
            mask = source
        elif mask.target in _COLUMNS and len(shape_of(source)) == 1 and _is_column(mask, rows):
            return _test(_uncast(source), full)
        else:
            break
    return _test(mask, full) if _is_column(mask, rows) else None


def _is_wider(mask: Node, source: Node, rows: Size) -> bool:
    """A mask that was cast, or expanded from [B, 1]."""
    if mask.target in CASTS:
        return source.meta["val"].dtype == torch.bool
    return mask.target in _EXPANDS and _is_column(source, rows)


_NOTS = (aten.logical_not.default, aten.bitwise_not.default)
_EXPANDS = (aten.expand.default, aten.expand_as.default)
_COLUMNS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default)


def _is_column(node: Node, rows: Size) -> bool:
    """[B, 1]."""
    shape = shape_of(node)
    return len(shape) == 2 and same(shape[0], rows) and static(shape[1]) == 1


def _test(test: Node, full: bool) -> tuple[Node, bool]:
    while test.target in _NOTS and isinstance(test.args[0], Node):
        test, full = test.args[0], not full
    return test, full


def _counted(checks: Checks, test: Node, full: bool) -> Node | None:
    """The count that a test compares with 0, or with 1."""
    if not isinstance(test.target, torch._ops.OpOverload) or not test.args or not isinstance(test.args[0], Node):
        return None
    count, name = test.args[0], test.target._schema.name
    bound = constant_of(test.args[1]) if len(test.args) > 1 else None
    exact, ordered = (("ne", 0), (("gt", 0), ("ge", 1))) if full else (("eq", 0), (("le", 0), ("lt", 1)))
    found = (name.removeprefix("aten::"), bound)
    natural = checks.values(count).intervals != () and checks.values(count).min >= 0
    if found != exact and not (natural and found in ordered):
        return None
    count = _uncast(count)
    return count.args[0] if count.target in _COLUMNS else count  # type: ignore[return-value]


def _counts_bags(count: Node, bag: dict[str, object]) -> bool:
    """Whether `count` [B] is 0 only for bags without ids."""
    ids, offsets, ends = bag["indices"], bag["offsets"], bool(bag["include_last_offset"])
    assert isinstance(ids, Node) and isinstance(offsets, Node)
    if ends and _is_cumulated(offsets, count):
        return True
    if count.target is aten.diff.default:
        diff = arguments_of(count)
        if diff["self"] is not offsets or diff["n"] != 1 or diff["dim"] not in (-1, 0) or diff["prepend"] is not None:
            return False
        return diff["append"] is None if ends else _is_number_of(ids, diff["append"])
    if count.target is aten.sub.Tensor and ends:
        after, before = count.args[:2]
        return _is_slice(after, offsets, 1, None) and _is_slice(before, offsets, 0, -1) and not count.kwargs
    return _counts_padded(count, ids, offsets, bag.get("padding_idx"))


def _is_number_of(ids: Node, tensor: object) -> bool:
    """A tensor of one element: how many ids there are."""
    total = shape_of(ids)[0]
    if not is_tensor(tensor) or static(shape_of(tensor)[0]) != 1:
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
    parts = offsets.args[0] if offsets.target is aten.cat.default else None
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return False
    zero, sums = parts
    if not isinstance(zero, Node) or constant_of(zero) != 0 or static(shape_of(zero)[0]) != 1:
        return False
    return isinstance(sums, Node) and sums.target is aten.cumsum.default and sums.args[0] is lengths


def _counts_padded(count: Node, ids: Node, offsets: Node, padding: object) -> bool:
    """(rows != padding).sum(1), where the bags are those rows [B, L], one after the other."""
    if count.target is not aten.sum.dim_IntList or padding is None or count.args[1] not in ([1], [-1]):
        return False
    mask = _uncast(count.args[0])  # type: ignore[arg-type]
    if mask.target not in (aten.ne.Scalar, aten.ne.Tensor) or constant_of(mask.args[1]) != padding:
        return False
    rows = mask.args[0]
    if ids.target not in (aten.reshape.default, aten.view.default) or rows is not ids.args[0]:
        return False
    return isinstance(rows, Node) and len(shape_of(rows)) == 2 and _starts_of_rows(offsets, rows)


def _starts_of_rows(offsets: Node, rows: Node) -> bool:
    """arange(0, B * L, L), as F.embedding_bag makes it for ids [B, L]."""
    if offsets.target is not aten.arange.start_step or len(offsets.args) != 3 or offsets.args[0] != 0:
        return False
    B, L = shape_of(rows)
    step = offsets.args[2]
    return same(shape_of(offsets)[0], B) and same(step.meta["val"] if isinstance(step, Node) else step, L)  # type: ignore[arg-type]
