"""Masks of padded sequences: which lanes of a row count, told by its length or by its ids.

The spellings, for ids [B, L] and lengths [B, 1]:

    torch.arange(L) < lengths     lengths > torch.arange(L)     torch.arange(L) <= lengths - 1 ...
    ids != 0     ids > 0     ids.ne(0)     ids.bool()     ~(ids == 0)     1 - (ids == 0).float()     a & b     ~(a | b)

as bool or number, through casts, unsqueeze, expand, repeat, repeat_interleave, transpose and reshapes of size-1 axes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Compare
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.embedding_columns.index_substitution import COMPARES, INVERSE
from fxopt.patterns.embedding_columns.index_value import operand
from fxopt.patterns.embedding_columns.mask_axes import CASTS, LANE, VIEWS, Axes, moved_axes, numbered, unrepeated
from fxopt.shape.ranges.conditions import same_call
from fxopt.shape.sizes import is_tensor, same, same_shape, shape_of, static, tensor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Test:
    """Lanes where `compare(tensor, constant)` holds, `tensor` having one value a lane."""

    tensor: Node
    compare: Compare
    constant: Number
    axes: Axes

    def inverse(self) -> Test | None:
        """Where it does not hold. Not (NaN < c) holds, and NaN >= c does not."""
        if self.tensor.meta["val"].is_floating_point() and self.compare not in (Compare.EQ, Compare.NE):
            return None
        return replace(self, compare=INVERSE[self.compare])


@dataclass(frozen=True)
class Prefix:
    """Lanes l with l + first < lengths, `lengths` having one value a row."""

    lengths: Node
    first: int
    axes: Axes


Atom = Test | Prefix


@dataclass(frozen=True)
class Mask:
    """All atoms hold or, `inverted`, not all. nodes: every value on the way, which no edit may have changed."""

    atoms: tuple[Atom, ...]
    inverted: bool
    nodes: frozenset[Node] = field(compare=False)

    def turned(self, inverted: bool) -> Mask | None:
        """The same mask, said as `inverted` asks; only one atom may be able to."""
        if self.inverted is inverted:
            return self
        (only, *others) = self.atoms
        inverse = only.inverse() if isinstance(only, Test) and not others else None
        return None if inverse is None else Mask((inverse,), inverted, self.nodes)

    def invert(self) -> Mask:
        return replace(self, inverted=not self.inverted)

    def through(self, node: Node, axes: Callable[[Axes], Axes | None]) -> Mask | None:
        moved = [axes(atom.axes) for atom in self.atoms]
        if any(new is None for new in moved):
            return None
        atoms = tuple(replace(atom, axes=new) for atom, new in zip(self.atoms, moved, strict=True))  # type: ignore[arg-type]
        return Mask(atoms, self.inverted, self.nodes | {node})


def counting(mask: Mask, ids: Node, axes: tuple[int | None, ...]) -> tuple[Atom, ...] | None:
    """The atoms that hold where `mask` is 1, if they are masks over `ids` [..., L].

    axes: which axis of `ids` each axis of the mask should be; None: of size 1, or repeated.
    """
    said = mask.turned(inverted=False)
    return said.atoms if said is not None and all(_fits(atom, ids, axes) for atom in said.atoms) else None


def _fits(atom: Atom, ids: Node, axes: tuple[int | None, ...]) -> bool:
    shape = shape_of(ids)
    lane = len(shape) - 1
    expected = tuple(None if axis is None or static(shape[axis]) == 1 else axis for axis in axes)
    given = (None,) * (len(axes) - len(atom.axes)) + atom.axes
    if len(given) != len(expected):
        return False
    if isinstance(atom, Test):
        return same_shape(atom.tensor, ids) and given == expected
    sizes = shape_of(atom.lengths)
    rows = [(have, want) for have, want in zip(given, expected, strict=True) if want != lane]
    if any((have is None) != (want is None) for have, want in rows) or given.count(LANE) != 1:
        return False
    if given[axes.index(lane)] != LANE:
        return False
    counted = [(have, want) for have, want in rows if have is not None and want is not None]
    return counted == sorted(counted) and all(same(sizes[have], shape[want]) for have, want in counted)


def mask_of(node: Node) -> Mask | None:
    """The mask that `node` is: 1 (or True) where lanes count, else 0."""
    if node.op != "call_function" or tensor_of(node) is None or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target in VIEWS or node.target in CASTS:
        source = mask_of(node.args[0])
        return source.through(node, lambda axes: moved_axes(node, axes)) if source else _nonzero(node)
    if steps := _steps_to_part(node):
        return _part(steps)
    if node.target is aten.logical_not.default or (node.target is aten.bitwise_not.default and _is_bool(node)):
        source = mask_of(node.args[0])
        return source.through(node, lambda axes: axes).invert() if source else None  # type: ignore[union-attr]
    if node.target in _AND or node.target in _OR:
        return _both(node, inverted=node.target in _OR)
    return _complement(node) or _compared(node)


def _steps_to_part(node: Node) -> list[Node]:
    """The calls that take `node` from a tensor of all features; none where it is taken from no such tensor."""
    call = node.args[0]
    if node.target is operator.getitem and isinstance(call, Node) and call.target in _LISTS:
        return [call, node]
    return [node] if node.target in _PARTS else []


def _part(steps: list[Node]) -> Mask | None:
    """One feature's part of a mask over all features' ids, by the same part of the ids, which its lookup reads."""
    source = steps[0].args[0]
    whole = mask_of(source) if isinstance(source, Node) else None
    atoms: list[Atom] = []
    for atom in whole.atoms if whole else ():
        if not isinstance(atom, Test) or not same_shape(atom.tensor, source) or atom.axes != numbered(atom.tensor):  # type: ignore[arg-type]
            return None
        part: Node | None = atom.tensor
        for step in steps:
            users = part.users if part is not None else ()
            part = next((user for user in users if same_call(user, step)), None)
        if part is None:
            return None
        atoms.append(replace(atom, tensor=part, axes=numbered(part)))
    return Mask(tuple(atoms), whole.inverted, whole.nodes | {steps[-1]}) if whole else None


def _complement(node: Node) -> Mask | None:
    """1 - mask, mask == 0, mask != 1 and their kin."""
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.kwargs or len(node.args) > 2:
        return None
    if node.target is aten.sub.Tensor and constant_of(first) is not None:
        first, second = second, first
    elif node.target not in (aten.rsub.Scalar, *COMPARES):
        return None
    source, constant = mask_of(first) if isinstance(first, Node) else None, constant_of(second)
    if source is None or constant not in (0, 1):
        return None
    how = COMPARES.get(node.target), constant  # type: ignore[arg-type, call-overload]
    if how not in (*_SAYS_ONE, *_SAYS_ZERO):
        return None
    inverts = how in _SAYS_ZERO
    result = source.through(node, lambda axes: (None,) * (len(shape_of(node)) - len(axes)) + axes)
    return result.invert() if inverts and result else result


def _both(node: Node, inverted: bool) -> Mask | None:
    left, right = node.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    masks = [mask_of(left), mask_of(right)]
    rank = len(shape_of(node))
    one, other = (m.turned(inverted) if m else None for m in masks)
    if one is None or other is None:
        return None
    joined = Mask((*one.atoms, *other.atoms), inverted, one.nodes | other.nodes)
    return joined.through(node, lambda axes: (None,) * (rank - len(axes)) + axes)


def _compared(node: Node) -> Mask | None:
    """ids != 0, or arange < lengths."""
    left, right = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.target in _ORDERS and isinstance(right, Node):
        order = _ORDERS[node.target]
        found = _prefix(node, left, right, order) or _prefix(node, right, left, _FLIPPED[order])
        if found is not None:
            return found
    compare, number = COMPARES.get(node.target), constant_of(right)  # type: ignore[call-overload]
    if compare is None or not is_tensor(left):
        return None
    constant = operand(left.meta["val"].dtype, number) if number is not None else None
    if constant is None or len(shape_of(left)) != len(shape_of(node)):
        return None
    return Mask((Test(left, compare, constant, numbered(left)),), False, frozenset((node, left)))


def _nonzero(node: Node) -> Mask | None:
    """ids.bool()"""
    ids = node.args[0]
    if node.target not in CASTS or not _is_bool(node) or not is_tensor(ids):
        return None
    zero = operand(ids.meta["val"].dtype, 0)
    return None if zero is None else Mask((Test(ids, Compare.NE, zero, numbered(ids)),), False, frozenset((node, ids)))


def _prefix(node: Node, positions: object, lengths: object, compare: Compare) -> Mask | None:
    """positions `compare` lengths: an arange against one value a row."""
    if not isinstance(positions, Node) or not is_tensor(lengths):
        return None
    counted, dtype = _positions(positions), lengths.meta["val"].dtype
    if counted is None or dtype in (torch.bool, torch.float16, torch.bfloat16) or dtype.is_complex:
        return None
    first, axes, nodes = counted
    if dtype.is_floating_point and (compare is not Compare.LT or first):
        return None
    first -= compare in (Compare.LE, Compare.GT)
    rank, (lengths, theirs) = len(shape_of(node)), unrepeated(lengths)
    axes, theirs = (None,) * (rank - len(axes)) + axes, (None,) * (rank - len(theirs)) + theirs
    if any(mine is not None and other is not None for mine, other in zip(axes, theirs, strict=True)):
        return None  # its lengths differ along the lanes
    joined = tuple(other if mine is None else mine for mine, other in zip(axes, theirs, strict=True))
    if joined.count(LANE) != 1:
        return None
    mask = Mask((Prefix(lengths, first, joined),), compare in (Compare.GE, Compare.GT), nodes | {node, lengths})
    lanes = shape_of(node)[joined.index(LANE)]
    return mask if same(lanes, shape_of(positions)[joined.index(LANE) - rank]) else None


def _positions(node: Node) -> tuple[int, Axes, frozenset[Node]] | None:
    """(s, its axes, nodes) of a tensor that is s + l at lane l."""
    if node.target in _ARANGES and node.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        start, step = (0, 1) if node.target is aten.arange.default else (node.args[0], (*node.args, 1)[2])
        whole = isinstance(start, int) and step == 1 and isinstance(step, int)
        return (start, (LANE,), frozenset((node,))) if whole else None  # type: ignore[return-value]
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not is_tensor(source) or node.target not in (*VIEWS, *CASTS):
        return None
    if node.meta["val"].dtype not in (torch.int64, torch.int32, torch.float32, torch.float64):
        return None
    found = _positions(source)
    axes = moved_axes(node, found[1]) if found else None
    return (found[0], axes, found[2] | {node}) if found and axes is not None else None


def _is_bool(node: Node) -> bool:
    return node.meta["val"].dtype == torch.bool


_PARTS = (aten.select.int, aten.slice.Tensor)
_LISTS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor)
_OR = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
_SAYS_ZERO = ((None, 1), (Compare.EQ, 0), (Compare.NE, 1), (Compare.LT, 1), (Compare.LE, 0))  # None: constant - mask
_SAYS_ONE = ((Compare.EQ, 1), (Compare.NE, 0), (Compare.GT, 0), (Compare.GE, 1))
_FLIPPED = {Compare.LT: Compare.GT, Compare.GT: Compare.LT, Compare.LE: Compare.GE, Compare.GE: Compare.LE}
_ORDERS = {getattr(aten, order.name.lower()).Tensor: order for order in _FLIPPED}
