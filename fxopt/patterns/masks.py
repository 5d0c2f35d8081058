"""Masks of padded sequences: which lanes of a row count, told by its length or by its ids.

The spellings, for ids [B, L] and lengths [B, 1]:

    torch.arange(L) < lengths     lengths > torch.arange(L)     torch.arange(L) <= lengths - 1 ...
    ids != 0     ids > 0     ids.ne(0)     ~(ids == 0)     1 - (ids == 0).float()     a & b

as bool or number, through casts, unsqueeze, expand, repeat, repeat_interleave, transpose and reshapes of size-1 axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Compare
from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.index_substitution import COMPARES, INVERSE
from fxopt.patterns.index_value import operand
from fxopt.shape.sizes import same, shape_of, static, tensor_of

aten = torch.ops.aten
_LANE = -1  # the axis that counts along a row; others are numbered as in the atom's tensor, None: it repeats
Axes = tuple[int | None, ...]


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

    def inverse(self) -> None:
        return None


Atom = Test | Prefix


@dataclass(frozen=True)
class Mask:
    """All atoms hold or, `inverted`, not all. nodes: every value on the way, which no edit may have changed."""

    atoms: tuple[Atom, ...]
    inverted: bool
    nodes: frozenset[Node] = field(compare=False)

    @property
    def holds(self) -> tuple[Atom, ...] | None:
        """The atoms of which all hold where the mask is 1; None where no conjunction says so."""
        if not self.inverted:
            return self.atoms
        inverse = self.atoms[0].inverse() if len(self.atoms) == 1 else None
        return None if inverse is None else (inverse,)

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
    atoms = mask.holds
    return atoms if atoms is not None and all(_fits(atom, ids, axes) for atom in atoms) else None


def _fits(atom: Atom, ids: Node, axes: tuple[int | None, ...]) -> bool:
    shape = shape_of(ids)
    lane = len(shape) - 1
    expected = tuple(None if axis is None or static(shape[axis]) == 1 else axis for axis in axes)
    given = (None,) * (len(axes) - len(atom.axes)) + atom.axes
    if len(given) != len(expected):
        return False
    if isinstance(atom, Test):
        tested = shape_of(atom.tensor)
        return len(tested) == len(shape) and all(map(same, tested, shape)) and given == expected
    sizes = shape_of(atom.lengths)
    rows = [(have, want) for have, want in zip(given, expected, strict=True) if want != lane]
    if any((have is None) != (want is None) for have, want in rows) or given.count(_LANE) != 1:
        return False
    if given[axes.index(lane)] != _LANE:
        return False
    counted = [(have, want) for have, want in rows if have is not None and want is not None]
    return counted == sorted(counted) and all(same(sizes[have], shape[want]) for have, want in counted)


def mask_of(node: Node) -> Mask | None:
    """The mask that `node` is: 1 (or True) where lanes count, else 0."""
    if node.op != "call_function" or tensor_of(node) is None or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target in _VIEWS or node.target in _CASTS:
        source = mask_of(node.args[0])
        return source.through(node, lambda axes: _moved(node, axes)) if source else None
    if node.target is aten.logical_not.default or (node.target is aten.bitwise_not.default and _is_bool(node)):
        source = mask_of(node.args[0])
        return source.through(node, lambda axes: axes).invert() if source else None  # type: ignore[union-attr]
    if node.target in _AND or node.target in _OR:
        return _both(node, inverted=node.target in _OR)
    return _complement(node) or _compared(node)


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
    if any(mask is None or mask.inverted is not inverted for mask in masks):
        return None
    rank = len(shape_of(node))
    one, other = (m.through(node, lambda axes: (None,) * (rank - len(axes)) + axes) for m in masks)  # type: ignore[union-attr]
    assert one is not None and other is not None
    return Mask((*one.atoms, *other.atoms), inverted, one.nodes | other.nodes)


def _compared(node: Node) -> Mask | None:
    """ids != 0, or arange < lengths."""
    left, right = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.target in _ORDERS and isinstance(right, Node):
        order = _ORDERS[node.target]
        found = _prefix(node, left, right, order) or _prefix(node, right, left, _FLIPPED[order])
        if found is not None:
            return found
    compare = COMPARES.get(node.target)  # type: ignore[call-overload]
    if compare is None or not isinstance(left, Node) or tensor_of(left) is None:
        return None
    number = constant_of(right)
    constant = operand(left.meta["val"].dtype, number) if number is not None else None
    if constant is None or len(shape_of(left)) != len(shape_of(node)):
        return None
    test = Test(left, compare, constant, _numbered(left))
    return Mask((test,), False, frozenset((node, left)))


def _prefix(node: Node, positions: object, lengths: object, compare: Compare) -> Mask | None:
    """positions `compare` lengths: an arange against one value a row."""
    if not isinstance(positions, Node) or not isinstance(lengths, Node) or tensor_of(lengths) is None:
        return None
    counted, dtype = _positions(positions), lengths.meta["val"].dtype
    if counted is None or dtype in (torch.bool, torch.float16, torch.bfloat16) or dtype.is_complex:
        return None
    first, axes, nodes = counted
    if dtype.is_floating_point and (compare is not Compare.LT or first):
        return None
    first -= compare in (Compare.LE, Compare.GT)
    rank, (lengths, theirs) = len(shape_of(node)), _unrepeated(lengths)
    axes, theirs = (None,) * (rank - len(axes)) + axes, (None,) * (rank - len(theirs)) + theirs
    if any(mine is not None and other is not None for mine, other in zip(axes, theirs, strict=True)):
        return None  # its lengths differ along the lanes
    joined = tuple(other if mine is None else mine for mine, other in zip(axes, theirs, strict=True))
    if joined.count(_LANE) != 1:
        return None
    mask = Mask((Prefix(lengths, first, joined),), compare in (Compare.GE, Compare.GT), nodes | {node, lengths})
    lanes = shape_of(node)[joined.index(_LANE)]
    return mask if same(lanes, shape_of(positions)[joined.index(_LANE) - rank]) else None


def _positions(node: Node) -> tuple[int, Axes, frozenset[Node]] | None:
    """(s, its axes, nodes) of a tensor that is s + l at lane l."""
    if node.target in _ARANGES and node.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        start, step = (0, 1) if node.target is aten.arange.default else (node.args[0], (*node.args, 1)[2])
        whole = isinstance(start, int) and step == 1 and isinstance(step, int)
        return (start, (_LANE,), frozenset((node,))) if whole else None  # type: ignore[return-value]
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or tensor_of(source) is None or node.target not in (*_VIEWS, *_CASTS):
        return None
    if node.meta["val"].dtype not in (torch.int64, torch.int32, torch.float32, torch.float64):
        return None
    found = _positions(source)
    axes = _moved(node, found[1]) if found else None
    return (found[0], axes, found[2] | {node}) if found and axes is not None else None


def _unrepeated(node: Node) -> tuple[Node, Axes]:
    """What `node` repeats, and where its axes are in `node`."""
    source = node.args[0] if node.target in _REPEATS else None
    if not isinstance(source, Node):
        return node, _numbered(node)
    found, axes = _unrepeated(source)
    moved = _moved(node, axes)
    return (found, moved) if moved is not None else (node, _numbered(node))


def _is_bool(node: Node) -> bool:
    return node.meta["val"].dtype == torch.bool


def _numbered(node: Node) -> Axes:
    return tuple(None if static(size) == 1 else axis for axis, size in enumerate(shape_of(node)))


def _moved(node: Node, axes: Axes) -> Axes | None:
    """The axes of a view, given those of what it views."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = shape_of(source), shape_of(node)
    if node.target in _PERMUTES:
        order = _order(node, len(before))
        return tuple(axes[dim] for dim in order)
    if node.target in _REPEATS:
        axes, before = (None,) * (len(after) - len(axes)) + axes, (1,) * (len(after) - len(before)) + before
        return axes if all(axis is None or same(b, a) for axis, b, a in zip(axes, before, after, strict=True)) else None
    real = [axis for axis, size in zip(axes, before, strict=True) if static(size) != 1]
    kept = [size for size in before if static(size) != 1]
    sizes = [size for size in after if static(size) != 1]
    if len(kept) != len(sizes) or not all(map(same, kept, sizes)):
        return None
    left = iter(real)
    return tuple(None if static(size) == 1 else next(left) for size in after)


def _order(node: Node, rank: int) -> list[int]:
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    if node.target is aten.t.default:
        return order[::-1]
    first, second = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return order


_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_CASTS = (
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default, aten.type_as.default,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default,
)  # fmt: skip
_PERMUTES = (aten.transpose.int, aten.permute.default, aten.t.default)
_REPEATS = (aten.expand.default, aten.expand_as.default, aten.repeat.default, aten.repeat_interleave.self_int)
_VIEWS = (
    *_PERMUTES, *_REPEATS, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default,
)  # fmt: skip
_AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor)
_OR = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
_SAYS_ZERO = ((None, 1), (Compare.EQ, 0), (Compare.NE, 1), (Compare.LT, 1), (Compare.LE, 0))  # None: constant - mask
_SAYS_ONE = ((Compare.EQ, 1), (Compare.NE, 0), (Compare.GT, 0), (Compare.GE, 1))
_ORDERS = {
    aten.lt.Tensor: Compare.LT,
    aten.le.Tensor: Compare.LE,
    aten.gt.Tensor: Compare.GT,
    aten.ge.Tensor: Compare.GE,
}
_FLIPPED = {Compare.LT: Compare.GT, Compare.GT: Compare.LT, Compare.LE: Compare.GE, Compare.GE: Compare.LE}
