"""Packed tensors: one tensor for all lanes, and the batched form of each operator on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.lanes import BY_DIM, Call, Leaf, Picked, Pool, Shared, Tree, piece_of
from fxopt.rewrites.core import Editor, Rejected
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten


@dataclass(frozen=True)
class Packed:
    """`node` holds lane l at index l of `dim`; dim None: every lane is `node` itself. rank: that of one lane."""

    node: Node
    dim: int | None
    rank: int


def moved(editor: Editor, packed: Packed, dim: int) -> Packed:
    """The same lanes at `dim`."""
    if packed.dim is None or packed.dim == dim:
        return packed
    order = [axis for axis in range(packed.rank + 1) if axis != packed.dim]
    order.insert(dim, packed.dim)
    return Packed(editor.call(aten.permute.default, packed.node, order), dim, packed.rank)


class Joint:
    """Tensors of one pool that leaves have in common, and where each lies once they are joined."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.places: dict[Node, int] = {}
        self.node: Node | None = None


class Packer:
    """Adds the packed calls of some trees; what two of them read is joined once.

    columns: how many of the added calls are lookups of selected ids, which one call of the embedding columns does.
    """

    def __init__(self, editor: Editor, leaves: Sequence[Leaf | Shared]) -> None:
        self.editor = editor
        self._joints: list[Joint] = []
        self._joint_of: dict[int, Joint] = {}
        self._made: dict[int, Packed] = {}
        self._selected: dict[Any, Node] = {}
        self.columns = 0
        for leaf in leaves:
            if isinstance(leaf, Leaf):
                self._add(leaf)

    def _add(self, leaf: Leaf) -> None:
        common = (joint for joint in self._joints if joint.pool == leaf.pool and joint.places.keys() & set(leaf.bases))
        joint = next(common, None)
        if joint is None:
            joint = Joint(leaf.pool)
            self._joints.append(joint)
        for base in leaf.bases:
            joint.places.setdefault(base, len(joint.places))
        self._joint_of[id(leaf)] = joint

    def packed(self, tree: Tree) -> Packed:
        if id(tree) not in self._made:
            self._made[id(tree)] = self._packed(tree)
        return self._made[id(tree)]

    def _packed(self, tree: Tree) -> Packed:
        match tree:
            case Shared(node):
                return Packed(node, None, len(shape_of(node)))
            case Leaf():
                return self._leaf(tree)
            case Picked(inner, index):
                packed = self.packed(inner)
                assert packed.dim is not None
                return Packed(self._taken(packed.node, packed.dim, index), packed.dim, packed.rank)
        if tree.target in BY_DIM:
            return self._by_dim(tree)
        args = [self.packed(argument) if isinstance(argument, Tree) else argument for argument in tree.args]
        if tree.target is aten.linear.default:
            return self._linear(*args)
        if tree.target is aten.matmul.default:
            return self._matmul(*args)
        return self._pointwise(tree.target, args, tree.node.kwargs, len(shape_of(tree.node)))

    def _leaf(self, leaf: Leaf) -> Packed:
        joint = self._joint_of[id(leaf)]
        source, dim, extent = self._joined(joint), leaf.pool.dim, 1
        if dim is not None:
            extent = static(shape_of(leaf.bases[0])[dim]) or 0
        starts = [joint.places[base] * extent + start for base, start in zip(leaf.bases, leaf.starts, strict=True)]
        dim = _stacked_at(leaf.pool) if dim is None else dim
        if leaf.size is None:
            return Packed(self._taken(source, dim, starts), dim, leaf.rank)
        places = [start + offset for start in starts for offset in range(leaf.size)]
        taken = self._taken(source, dim, places)
        return Packed(self.editor.call(aten.unflatten.int, taken, dim, [len(starts), leaf.size]), dim, leaf.rank)

    def _joined(self, joint: Joint) -> Node:
        if joint.node is None:
            pool, bases = joint.pool, list(joint.places)
            if pool.kind == "looked up":
                bases = [self._looked_up(base) for base in bases]
            if pool.dim is None:
                joint.node = self.editor.call(aten.stack.default, bases, _stacked_at(pool))
            else:
                joint.node = bases[0] if len(bases) == 1 else self.editor.call(aten.cat.default, bases, pool.dim)
        return joint.node

    def _looked_up(self, piece: Node) -> Node:
        """select(table[ids]) as table[select(ids)], which the columns write where it is read."""
        found = piece_of(piece)
        assert found is not None
        table, ids, *rest = found.base.args
        key = ids, found.dim, found.start
        if key not in self._selected:
            self._selected[key] = self.editor.call(aten.select.int, *key)
            self.columns += 1
        self.columns += 1
        return self.editor.call(aten.embedding.default, table, self._selected[key], *rest)

    def _taken(self, source: Node, dim: int, index: Sequence[int]) -> Node:
        """The entries of `dim` that `index` lists; neighbours are a slice, and all of them the tensor itself."""
        first, last = index[0], index[-1]
        if list(index) == list(range(first, last + 1)):
            if first == 0 and last + 1 == static(shape_of(source)[dim]):
                return source
            return self.editor.call(aten.slice.Tensor, source, dim, first, last + 1)
        places = self.editor.constant("lanes", torch.tensor(index))
        return self.editor.call(aten.index_select.default, source, dim, places)

    def _linear(self, x: Packed, weight: Packed, bias: Packed | None = None) -> Packed:
        """x [..., K], weight [N, K], bias [N] in each lane: one linear, one wide linear, or one product in batches."""
        if weight.dim is None:
            x = moved(self.editor, x, 0) if x.dim == x.rank else x
            return self._biased(self.editor.call(aten.linear.default, x.node, weight.node), x.dim, x.rank, bias)
        weight = moved(self.editor, weight, 0)
        if x.dim is None and weight.node.meta["val"].is_contiguous():
            return self._wide_linear(x, weight, bias)
        return self._batched_linear(x, weight, bias)

    def _wide_linear(self, x: Packed, weight: Packed, bias: Packed | None) -> Packed:
        call = self.editor.call
        lanes, outputs = shape_of(weight.node)[:2]
        wide = call(aten.linear.default, x.node, call(aten.flatten.using_ints, weight.node, 0, 1))
        return self._biased(call(aten.unflatten.int, wide, -1, [lanes, outputs]), x.rank - 1, x.rank, bias)

    def _batched_linear(self, x: Packed, weight: Packed, bias: Packed | None) -> Packed:
        call, lanes = self.editor.call, shape_of(weight.node)[0]
        x = moved(self.editor, x, 0)
        node = call(aten.unsqueeze.default, x.node, 0) if x.dim is None else x.node
        inner = [static(size) for size in shape_of(node)[2:-1]]
        if x.rank < 2 or None in inner:
            raise Rejected("its input has no batch, or more than one size that depends on the inputs")
        if inner:
            node = call(aten.flatten.using_ints, node, 1, -2)
        if x.dim is None:
            node = call(aten.expand.default, node, [lanes, -1, -1])
        node = call(aten.bmm.default, node, call(aten.transpose.int, weight.node, 1, 2))
        if inner:
            node = call(aten.unflatten.int, node, 1, [-1, *inner])
        return self._biased(node, 0, x.rank, bias)

    def _biased(self, node: Node, dim: int | None, rank: int, bias: Packed | None) -> Packed:
        packed = Packed(node, dim, rank)
        return packed if bias is None else self._pointwise(aten.add.Tensor, [packed, bias], {}, rank)

    def _matmul(self, left: Packed, right: Packed) -> Packed:
        """x [..., K] times a matrix [K, N], or a matrix [N, K] times columns [..., K, 1], which are x."""
        call = self.editor.call
        if right.rank == 2:
            return self._linear(left, self._transposed(right))
        right = moved(self.editor, right, 0) if right.dim == right.rank else right
        x = Packed(call(aten.squeeze.dim, right.node, -1), right.dim, right.rank - 1)
        rows = self._linear(x, left)
        rows = moved(self.editor, rows, 0) if rows.dim == rows.rank else rows
        return Packed(call(aten.unsqueeze.default, rows.node, -1), rows.dim, right.rank)

    def _transposed(self, matrix: Packed) -> Packed:
        matrix = moved(self.editor, matrix, 0)
        return Packed(self.editor.call(aten.transpose.int, matrix.node, -2, -1), matrix.dim, 2)

    def _by_dim(self, tree: Call) -> Packed:
        """An operator whose arguments name dims: those behind the lanes count one more."""
        source, node = self.packed(tree.args[0]), tree.node
        lanes, rank = source.dim, source.rank
        assert lanes is not None
        named = tree.args[1:]
        if node.target is aten.t.default:
            if rank < 2:
                return source
            named = (0, 1)
        target = aten.transpose.int if node.target is aten.t.default else tree.target
        if target is aten.transpose.int:
            shifted = [_behind(dim, lanes, rank) for dim in named]
            return Packed(self.editor.call(target, source.node, *shifted), lanes, rank)
        if target is aten.unsqueeze.default:
            dim = named[0] % (rank + 1)
            made = self.editor.call(target, source.node, dim + (dim > lanes))
            return Packed(made, lanes + (dim <= lanes), rank + 1)
        dims = [dim % rank for dim in (named[0] if isinstance(named[0], list | tuple) else [named[0]])]
        shifted = [_behind(dim, lanes, rank) for dim in dims or range(rank)]
        first = shifted if isinstance(named[0], list | tuple) else shifted[0]
        made = self.editor.call(target, source.node, first, *named[1:], **node.kwargs)
        after = len(shape_of(node))
        gone = [dim for dim in dims or range(rank) if dim < lanes] if after < rank else []
        return Packed(made, lanes - len(gone), after)

    def _pointwise(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], rank: int) -> Packed:
        """Lanes of every argument at one place, counted from the last dim, as broadcasting does."""
        _, place = max((a.rank, a.dim - a.rank - 1) for a in args if isinstance(a, Packed) and a.dim is not None)
        aligned = [self._aligned(a, place) if isinstance(a, Packed) else a for a in args]
        return Packed(self.editor.call(target, *aligned, **kwargs), rank + 1 + place, rank)

    def _aligned(self, packed: Packed, place: int) -> Node:
        """The lanes at the dim `place` < 0; a dim of size 1 for what all lanes share."""
        call, dim = self.editor.call, packed.rank + 1 + place
        if packed.dim is None:
            return call(aten.unsqueeze.default, packed.node, place) if packed.rank and dim >= 0 else packed.node
        node = moved(self.editor, packed, max(dim, 0)).node
        for _ in range(-dim):
            node = call(aten.unsqueeze.default, node, 1)
        return node


def _behind(dim: int, lanes: int, rank: int) -> int:
    """Where the dim of a lane is beside the lanes."""
    dim %= rank
    return dim + (dim >= lanes)


def _stacked_at(pool: Pool) -> int:
    """Weights in front, as products in batches want them; columns behind the batch, where one call writes them."""
    return 0 if pool.kind == "state" else min(1, len(pool.shape))
