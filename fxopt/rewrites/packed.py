"""Packed tensors: one tensor for all lanes, and the batched form of each operator on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from fxopt.kernels.by_rows.op import in_chunks, unless_many
from fxopt.patterns.repeated.lanes import BY_DIM, piece_of
from fxopt.patterns.repeated.trees import Call, Leaf, Picked, Pool, Shared, Tree
from fxopt.rewrites.direct import as_function
from fxopt.rewrites.editor import Editor, Rejected
from fxopt.rewrites.regions import calls_of
from fxopt.shape.aliases import makes_results
from fxopt.shape.sizes import Size, same, shape_of, static

aten = torch.ops.aten
_IN_LOOPS = ("pieces", "state")  # a loop reads them as they are


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
    """Adds the packed calls of some trees to a function of its own; what they read is joined outside of it, once.

    inputs: what that function is called with.
    columns: how many calls outside are lookups of selected ids, which one call of the embedding columns does.
    """

    def __init__(self, outer: Editor, leaves: Sequence[Leaf | Shared]) -> None:
        graph = Graph()
        self.function = GraphModule(torch.nn.Module(), graph)
        self.editor = Editor(self.function, self.function.graph.output(()))
        self.outer = outer
        self._inputs: dict[Node, Node] = {}
        self._joints: list[Joint] = []
        self._joint_of: dict[int, Joint] = {}
        self._made: dict[int, Packed] = {}
        self._selected: dict[Any, Node] = {}
        self._places: dict[tuple[int, ...], Node] = {}
        self.columns = 0
        self._saves_work = False
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

    @property
    def inputs(self) -> list[Node]:
        return list(reversed(self._inputs))

    def input(self, node: Node) -> Node:
        """A node of the outer graph, inside of the function."""
        if node not in self._inputs:
            self._inputs[node] = self.editor.parameter(node)
        return self._inputs[node]

    def called(self, result: Node, anchor: Node, rowwise: bool, calls: int) -> Node:
        """The call of the function that ends in `result`, in place of `anchor` and the `calls` that it needed."""
        (output,) = self.function.graph.find_nodes(op="output")
        output.args = (result,)
        made = [node for node in self.editor.added if not _is_view(node)]
        loop = None
        if len(made) > 1 and not self._saves_work and all(joint.pool.kind in _IN_LOOPS for joint in self._joints):
            loop = self._loop(anchor)
        self.function.recompile()
        batch, run = shape_of(anchor)[0], as_function(self.function.graph)
        split = [any(same(size, batch) for size in shape_of(node)[:1]) for node in self.inputs]
        sizes = [bytes_of_row(node, batch) for node in made]
        if loop is not None and any(split):
            run = unless_many(run, as_function(loop), split, calls, sum(sizes))
        elif rowwise and len(made) > 1:  # one alone is the result
            run = in_chunks(run, split, max(sizes))
        call = self.outer.known(result.meta["val"], calling(self.function), *self.inputs)
        call.meta["rowwise"], call.meta["fresh"] = rowwise, makes_results(self.function.graph)
        call.meta["function"] = self.function.graph
        call.meta["bound"], call.meta["calls"] = run, sum(map(calls_of, self.function.graph.nodes))
        return call

    def _loop(self, anchor: Node) -> Graph:
        """What the function replaces, as a function of the same inputs."""
        inside, unread = set[Node](), [anchor]
        reads = {base for joint in self._joints for base in joint.places} | set(self._inputs)
        while unread:
            node = unread.pop()
            if node not in inside:
                inside.add(node)
                unread.extend(needed for needed in node.all_input_nodes if needed not in reads)
        for node in sorted(inside):
            for needed in node.all_input_nodes:
                if needed in reads:
                    self.input(needed)
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
        for node in sorted(inside):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[anchor])
        return graph

    def packed(self, tree: Tree) -> Packed:
        if id(tree) not in self._made:
            self._made[id(tree)] = self._packed(tree)
        return self._made[id(tree)]

    def _packed(self, tree: Tree) -> Packed:
        match tree:
            case Shared(node):
                return Packed(self.input(node), None, len(shape_of(node)))
            case Leaf():
                return self._leaf(tree)
            case Picked(inner, index):
                packed = self._rows_first(self.packed(inner))
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
        source, dim, extent = self.input(self._joined(joint)), leaf.pool.dim, 1
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
                joint.node = self.outer.call(aten.stack.default, bases, _stacked_at(pool))
            else:
                joint.node = bases[0] if len(bases) == 1 else self.outer.call(aten.cat.default, bases, pool.dim)
        return joint.node

    def _looked_up(self, piece: Node) -> Node:
        """select(table[ids]) as table[select(ids)], which the columns write where it is read."""
        found = piece_of(piece)
        assert found is not None
        table, ids, *rest = found.base.args
        key = ids, found.dim, found.start
        if key not in self._selected:
            self._selected[key] = self.outer.call(aten.select.int, *key)
            self.columns += 1
        self.columns += 1
        return self.outer.call(aten.embedding.default, table, self._selected[key], *rest)

    def _taken(self, source: Node, dim: int, index: Sequence[int]) -> Node:
        """The entries of `dim` that `index` lists; neighbours are a slice, and all of them the tensor itself."""
        first, last = index[0], index[-1]
        if list(index) == list(range(first, last + 1)):
            if first == 0 and last + 1 == static(shape_of(source)[dim]):
                return source
            return self.editor.call(aten.slice.Tensor, source, dim, first, last + 1)
        places = self._places.get(tuple(index))
        if places is None:
            places = self._places[tuple(index)] = self.outer.constant("lanes", torch.tensor(index))
        return self.editor.call(aten.index_select.default, source, dim, self.input(places))

    def _rows_first(self, packed: Packed) -> Packed:
        """What a product in batches has left lane by lane: row by row, as the lanes' other tensors are."""
        if packed.dim != 0 or packed.rank < 2:
            return packed
        turned = moved(self.editor, packed, 1)
        return Packed(self.editor.call(aten.contiguous.default, turned.node), 1, packed.rank)

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
        """torch takes [B, 1, K] x [N, K] for B products; as a matrix it is one."""
        call, self._saves_work = self.editor.call, True
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
        return packed if bias is None else self._pointwise(aten.add.Tensor, [packed, bias], {}, rank)

    def _matmul(self, left: Packed, right: Packed) -> Packed:
        """x [..., K] times a matrix [K, N], or a matrix [N, K] times columns [..., K, 1], which are x."""
        call = self.editor.call
        if right.rank == 2:
            return self._linear(left, self._transposed(right))
        self._saves_work = True  # torch copies the matrix for every column
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
        if target is aten.permute.default:
            order = [_behind(dim, lanes, rank) for dim in named[0]]
            order.insert(lanes, lanes)
            return Packed(self.editor.call(target, source.node, order), lanes, rank)
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


def calling(module: GraphModule) -> Callable[..., Any]:
    """What stands in the graph: any compiler can look inside."""

    def packed(*inputs: Any) -> Any:
        return module(*inputs)

    return packed


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def bytes_of_row(node: Node, batch: Size) -> int:
    """Of one row of a result; sizes that depend on the inputs count as one."""
    value = node.meta["val"]
    sizes = [static(size) or 1 for size in value.shape if not same(size, batch)]
    return math.prod(sizes) * value.element_size()


def _behind(dim: int, lanes: int, rank: int) -> int:
    """Where the dim of a lane is beside the lanes."""
    dim %= rank
    return dim + (dim >= lanes)


def _stacked_at(pool: Pool) -> int:
    """Weights in front, as products in batches want them; columns behind the batch, where one call writes them."""
    return 0 if pool.kind == "state" else min(1, len(pool.shape))
