"""Lanes: tensors that are computed alike, packed into a tree of calls over one more axis (trees.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxopt.patterns.repeated.trees import Call, Lanes, Leaf, Picked, Pool, Shared, Tree, operands_of
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.calls import is_pointwise
from fxopt.shape.sizes import Size, expression, product, shape_of, static, tensor_of
from fxopt.shape.view_operators import viewed

aten = torch.ops.aten
FEWEST = 4  # lanes worth an axis
# A copy of 4096 floats takes 1.5 us; the linear whose weight it is, 2.5 us to call.
_MOST_COPIED = 4096
_MOST_JOINED = 2  # entries joined for each one that is read
LINEARS = (aten.linear.default, aten.matmul.default)
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim}
_VIEWS = {aten.squeeze.dim, aten.unsqueeze.default, aten.transpose.int, aten.permute.default, aten.t.default}
BY_DIM = _REDUCTIONS | _VIEWS | {aten.softmax.int, aten.repeat.default}


class NotPacked(Exception):
    """Why lanes cannot share an axis."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True)
class Piece:
    base: Node
    dim: int
    start: int
    size: int | None


class Packing:
    """Trees over the nodes of one graph."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._keys: dict[Node, int] = {}
        self._numbers: dict[Any, int] = {}
        self._pieces: dict[Node, Piece | None] = {}
        self._packed: dict[Lanes, Tree] = {}

    def key(self, node: Node) -> int:
        """Equal for two nodes that are computed alike, but for what their leaves hold."""
        unread = [node]
        while unread:
            last = unread[-1]
            needed = [n for n in last.all_input_nodes if n not in self._keys] if self.is_call(last) else []
            if needed:
                unread.extend(needed)
                continue
            unread.pop()
            self._keys[last] = self._numbers.setdefault(self._spelled(last), len(self._numbers))
        return self._keys[node]

    def is_call(self, node: Node) -> bool:
        """Whether lanes of this operator can be one call."""
        target = node.target
        if not isinstance(target, OpOverload) or not (is_pointwise(target) or target in BY_DIM or target in LINEARS):
            return False
        value = tensor_of(node)
        if value is None or not value.is_floating_point() or not is_pure(node) or self._aliases.edited(node):
            return False
        tensors = [tensor_of(argument) for argument in node.all_input_nodes]
        return all(tensor is not None and tensor.dtype == value.dtype for tensor in tensors)

    def computes(self, node: Node) -> bool:
        """Whether it is a call, and more than a view of something."""
        while node.target in _VIEWS and isinstance(node.args[0], Node):
            node = node.args[0]
        return self.is_call(node)

    def piece(self, node: Node) -> Piece | None:
        if node not in self._pieces:
            self._pieces[node] = piece_of(node)
        return self._pieces[node]

    def pack(self, lanes: Lanes) -> Tree:
        """Raises NotPacked. The lanes have one key."""
        first = lanes[0]
        if all(lane is first for lane in lanes):
            return Shared(first)
        if lanes not in self._packed:
            self._packed[lanes] = self._pack(lanes)
        return self._packed[lanes]

    def _pack(self, lanes: Lanes) -> Tree:
        first = lanes[0]
        edited = next(filter(self._aliases.edited, lanes), None)
        if edited is not None:
            raise NotPacked("it is edited in place, or shares memory with what is", edited)
        if not self.is_call(first) and self.piece(first) is not None:
            return self._cut(lanes)
        distinct = dict.fromkeys(lanes)
        if len(distinct) < len(lanes):
            place = {lane: index for index, lane in enumerate(distinct)}
            return Picked(self.pack(tuple(distinct)), tuple(place[lane] for lane in lanes))
        return self._call(lanes) if self.is_call(first) else self._whole(lanes)

    def _call(self, lanes: Lanes) -> Call:
        arguments = zip(*(lane.args for lane in lanes), strict=True)
        args = tuple(self.pack(column) if isinstance(column[0], Node) else column[0] for column in arguments)
        call = Call(lanes, args)
        _check(call)
        return call

    def _cut(self, lanes: Lanes) -> Leaf:
        pieces = [piece for lane in lanes if (piece := self.piece(lane)) is not None]
        first, bases = pieces[0], tuple(piece.base for piece in pieces)
        dtype, rank = first.base.meta["val"].dtype, len(shape_of(lanes[0]))
        several = len(set(bases)) > 1
        if several and len(set(lanes)) == len(lanes) and all(map(self._is_looked_up, pieces)):
            return Leaf(Pool("looked up", _spelled_shape(lanes[0]), dtype, None), lanes, (0,) * len(lanes), None, rank)
        if several:
            extent = static(shape_of(first.base)[first.dim]) or 0
            if len(set(bases)) * extent > _MOST_JOINED * len(lanes) * (first.size or 1):
                raise NotPacked("its inputs are a few slices of many tensors", lanes[0])
            _check_weights(first.base)
        pool = Pool("pieces", _spelled_shape(first.base), dtype, first.dim)
        return Leaf(pool, bases, tuple(piece.start for piece in pieces), first.size, rank)

    def _whole(self, lanes: Lanes) -> Leaf:
        """Whole tensors, where joining them costs nothing or next to nothing."""
        first = lanes[0]
        kind = _kind(first)
        if kind == "other":
            raise NotPacked("its inputs are separate tensors; to join them would copy as much as it saves", first)
        _check_weights(first)
        pool = Pool(kind, _spelled_shape(first), first.meta["val"].dtype, None)
        return Leaf(pool, lanes, (0,) * len(lanes), None, len(shape_of(first)))

    def _is_looked_up(self, piece: Piece) -> bool:
        """Whether a select of a lookup is as well a lookup of a select: no gradient whose form depends on all ids."""
        base = piece.base
        if base.target is not aten.embedding.default or len(base.args) > 3 or piece.size is not None:
            return False
        return piece.dim < len(shape_of(base)) - 1 and not any(map(self._aliases.edited, base.all_input_nodes))

    def _spelled(self, node: Node) -> Any:
        dtype = node.meta["val"].dtype if tensor_of(node) is not None else None
        if self.is_call(node):
            args = tuple(
                self._keys[argument] if isinstance(argument, Node) else repr(argument) for argument in node.args
            )
            return node.target, args, repr(node.kwargs), _spelled_shape(node), dtype
        piece = self.piece(node)
        if piece is not None:
            own = piece.base if _is_large(piece.base) else None  # cuts of several such tensors would not be joined
            return "piece", own, _spelled_shape(piece.base), piece.dim, piece.size, dtype
        if tensor_of(node) is None:
            return node
        return _kind(node), _spelled_shape(node), dtype, str(node.meta["val"].device)


def _check(call: Call) -> None:
    """What is left to the embedding columns, and what no batched operator computes."""
    node, trees = call.node, [argument for argument in call.args if isinstance(argument, Tree)]
    lookups = [tree for tree in trees if _is_lookup(tree)]
    if lookups and (call.target in _REDUCTIONS or (is_pointwise(call.target) and len(lookups) < 2)):
        raise NotPacked("it may be part of an embedding column", node)
    if node.target is aten.squeeze.dim and static(shape_of(node.args[0])[node.args[1]]) != 1:  # type: ignore
        raise NotPacked("it drops a dim for some input sizes only", node)
    if node.target is aten.matmul.default:
        ranks = [len(shape_of(operand)) for operand in operands_of(node)]
        if ranks[1] != 2 and not (ranks[0] == 2 and static(shape_of(operands_of(node)[1])[-1]) == 1):
            raise NotPacked("it is no product with a matrix of weights", node)


def _is_large(node: Node) -> bool:
    return _kind(node) == "state" and (static(product(shape_of(node))) or 0) > _MOST_COPIED


def _check_weights(node: Node) -> None:
    if _is_large(node):
        raise NotPacked("its weights are large: to copy them would take longer than the calls do", node)


def _is_lookup(tree: Tree) -> bool:
    if isinstance(tree, Picked):
        return _is_lookup(tree.tree)
    if isinstance(tree, Call):
        return tree.target in BY_DIM and _is_lookup(tree.args[0])
    return isinstance(tree, Leaf) and (tree.pool.kind == "looked up" or tree.bases[0].target is aten.embedding.default)


def _kind(node: Node) -> str:
    if node.target is aten.embedding.default:
        return "lookup"
    return "state" if node.op == "placeholder" and "state" in node.meta else "other"


def _spelled_shape(node: Node) -> tuple[Any, ...]:
    return tuple(size if isinstance(size, int) else expression(size) for size in shape_of(node))


def piece_of(node: Node) -> Piece | None:
    """One cut of one dim of a tensor, at a place and of a size that never change."""
    base, view = viewed(node) or (node, None)
    if view is None or any(len(axis.parts) != 1 for axis in view.axes):
        return None
    parts = [axis.parts[0] for axis in view.axes]
    cuts = [part for part in parts if part.start or not part.whole]
    dims = [part.dim for part in parts]
    if dims != sorted(dims) or len(cuts) + len(view.fixed) != 1:
        return None
    if static(shape_of(base)[cuts[0].dim if cuts else view.fixed[0][0]]) is None:
        return None
    if view.fixed:
        ((dim, start),) = view.fixed
        return Piece(base, dim, start, None)
    (part,) = cuts
    size: Size = part.size
    known = static(size)
    return None if known is None else Piece(base, part.dim, part.start, known)
