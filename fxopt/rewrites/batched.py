"""The batched form of each operator that lanes can share, on packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.repeated.trees import Call
from fxopt.rewrites.framework import Editor, Rejected
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.view_operators import through
from fxopt.shape.view_steps import Permute, Unsqueeze

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


class Batched:
    """Adds calls to a graph.

    saves_work: whether one of them computes less than the lanes did, or in fewer passes over its weights.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.saves_work = False

    def linear(self, x: Packed, weight: Packed, bias: Packed | None = None) -> Packed:
        """x [..., K], weight [N, K], bias [N] in each lane: one linear, one wide linear, or one product in batches."""
        if weight.dim is None:
            x = moved(self.editor, x, 0) if x.dim == x.rank else x
            return self._biased(self.editor.call(aten.linear.default, x.node, weight.node), x.dim, x.rank, bias)
        weight = moved(self.editor, weight, 0)
        if x.dim is None and weight.node.meta["val"].is_contiguous():
            return self._wide_linear(x, weight, bias)
        return self._batched_linear(x, weight, bias)

    def _wide_linear(self, x: Packed, weight: Packed, bias: Packed | None) -> Packed:
        """torch takes [B, 1, K] x [N, K] for B products; as a matrix it is one."""
        call, self.saves_work = self.editor.call, True
        lanes, outputs = shape_of(weight.node)[:2]
        ones = [size for size in shape_of(x.node)[1:-1] if static(size) == 1]
        as_matrix = 0 < len(ones) == x.rank - 2
        source = call(aten.flatten.using_ints, x.node, 0, -2) if as_matrix else x.node
        wide = call(aten.linear.default, source, call(aten.flatten.using_ints, weight.node, 0, 1))
        if as_matrix:
            return self._biased(call(aten.unflatten.int, wide, 1, [lanes, *ones, outputs]), 1, x.rank, bias)
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
        return packed if bias is None else self.pointwise(aten.add.Tensor, [packed, bias], {}, rank)

    def matmul(self, left: Packed, right: Packed) -> Packed:
        """x [..., K] times a matrix [K, N], or a matrix [N, K] times columns [..., K, 1], which are x."""
        call = self.editor.call
        if right.rank == 2:
            return self.linear(left, self._transposed(right))
        self.saves_work = True  # torch copies the matrix for every column
        right = moved(self.editor, right, 0) if right.dim == right.rank else right
        x = Packed(call(aten.squeeze.dim, right.node, -1), right.dim, right.rank - 1)
        rows = self.linear(x, left)
        rows = moved(self.editor, rows, 0) if rows.dim == rows.rank else rows
        return Packed(call(aten.unsqueeze.default, rows.node, -1), rows.dim, right.rank)

    def _transposed(self, matrix: Packed) -> Packed:
        matrix = moved(self.editor, matrix, 0)
        return Packed(self.editor.call(aten.transpose.int, matrix.node, -2, -1), matrix.dim, 2)

    def by_dim(self, tree: Call, source: Packed) -> Packed:
        """An operator whose arguments name dims: those behind the lanes count one more."""
        call, lanes, rank = self.editor.call, source.dim, source.rank
        if lanes is None:
            raise Rejected("all of them read one and the same result")
        _, step = through(tree.node) or (tree.node, None)
        match step:
            case Permute(order):
                shifted = [_behind(dim, lanes, rank) for dim in order]
                shifted.insert(lanes, lanes)
                return Packed(call(aten.permute.default, source.node, shifted), lanes, rank)
            case Unsqueeze(dim):
                made = call(aten.unsqueeze.default, source.node, dim + (dim > lanes))
                return Packed(made, lanes + (dim <= lanes), rank + 1)
        if tree.target is aten.repeat.default:
            return self._repeated(tree, source)
        return self._reduced(tree, source, lanes)

    def _repeated(self, tree: Call, source: Packed) -> Packed:
        """A number of times along each dim, and along dims in front of those that a lane has."""
        call, times, node = self.editor.call, tree.args[1], moved(self.editor, source, 0).node
        for _ in range(len(times) - source.rank):
            node = call(aten.unsqueeze.default, node, 1)
        return Packed(call(aten.repeat.default, node, [1, *times]), 0, len(times))

    def _reduced(self, tree: Call, source: Packed, lanes: int) -> Packed:
        """Of a reduction, a softmax, or a squeeze: over one dim or several, all of them where none is named."""
        call = self.editor.call
        if source.rank == 0:  # torch takes a number for a vector of one
            source = Packed(call(aten.unsqueeze.default, source.node, 1), lanes, 1)
        rank, (named, *rest) = source.rank, tree.args[1:]
        several = isinstance(named, list | tuple)
        dims = [dim % rank for dim in (named if several else [named])] or range(rank)
        shifted = [_behind(dim, lanes, rank) for dim in dims]
        made = call(tree.target, source.node, shifted if several else shifted[0], *rest, **tree.node.kwargs)
        after = len(shape_of(tree.node))
        if not after and len(shape_of(made)) > 1:
            made = call(aten.squeeze.dim, made, 1)
        gone = [dim for dim in dims if dim < lanes] if after < rank else []
        return Packed(made, lanes - len(gone), after)

    def pointwise(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], rank: int) -> Packed:
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
