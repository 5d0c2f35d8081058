"""Packed tensors: one tensor for all lanes, in a function of its own that one call runs (its operators: batched.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt.kernels.by_rows.op import in_chunks, unless_many
from fxopt.patterns.repeated.lanes import BY_DIM, piece_of
from fxopt.patterns.repeated.trees import Leaf, Picked, Pool, Shared, Tree
from fxopt.rewrites.batched import Batched, Packed, moved
from fxopt.rewrites.framework.direct import as_function
from fxopt.rewrites.framework.editor import Editor
from fxopt.rewrites.framework.regions import COMPUTES, calls_of
from fxopt.shape.aliases import makes_results
from fxopt.shape.calls import closure
from fxopt.shape.sizes import Size, same, shape_of, static

aten = torch.ops.aten
_IN_LOOPS = ("pieces", "state")  # a loop reads them as they are


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
        self._batched = Batched(self.editor)
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
        by_lane = not self._batched.saves_work and all(joint.pool.kind in _IN_LOOPS for joint in self._joints)
        loop = self._loop(anchor) if len(made) > 1 and by_lane else None
        self.function.recompile()
        batch, run = shape_of(anchor)[0], as_function(self.function.graph)
        split = [any(same(size, batch) for size in shape_of(node)[:1]) for node in self.inputs]
        sizes = [bytes_of_row(node, batch) for node in made]
        if loop is not None and any(split):
            run = unless_many(run, as_function(loop), split, calls, sum(sizes))
        elif rowwise and len(made) > 1:  # one alone is the result
            run = in_chunks(run, split, max(sizes))
        call = call_of(self.outer, self.function, result.meta["val"], self.inputs, run, rowwise)
        call.meta["function"] = self.function.graph
        call.meta[COMPUTES] += (loop,) * (loop is not None)
        return call

    def inlined(self, result: Node) -> Node:
        """The calls of the function in the outer graph itself."""
        outer = dict(zip(self.function.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        for node in self.editor.added:
            if callable(node.target):
                args, kwargs = map_arg((node.args, node.kwargs), outer.__getitem__)
                outer[node] = self.outer.call(node.target, *args, **kwargs)
        return outer[result]

    def _loop(self, anchor: Node) -> Graph:
        """What the function replaces, as a function of the same inputs."""
        reads = {base for joint in self._joints for base in joint.places} | set(self._inputs)
        inside = sorted(closure([anchor], lambda node: set(node.all_input_nodes) - reads))
        for node in inside:
            for needed in node.all_input_nodes:
                if needed in reads:
                    self.input(needed)
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
        for node in inside:
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
            return self._batched.by_dim(tree, self.packed(tree.args[0]))
        args = [self.packed(argument) if isinstance(argument, Tree) else argument for argument in tree.args]
        if tree.target is aten.linear.default:
            return self._batched.linear(*args)
        if tree.target is aten.matmul.default:
            return self._batched.matmul(*args)
        return self._batched.pointwise(tree.target, args, tree.node.kwargs, len(shape_of(tree.node)))

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
            numbers = torch.tensor(index, device="cpu")
            places = self._places[tuple(index)] = self.outer.constant("lanes", numbers, source)
        return self.editor.call(aten.index_select.default, source, dim, self.input(places))

    def _rows_first(self, packed: Packed) -> Packed:
        """What a product in batches has left lane by lane: row by row, as the lanes' other tensors are."""
        if packed.dim != 0 or packed.rank < 2:
            return packed
        turned = moved(self.editor, packed, 1)
        return Packed(self.editor.call(aten.contiguous.default, turned.node), 1, packed.rank)


def call_of(
    editor: Editor, function: GraphModule, value: Any, inputs: Sequence[Node], run: Callable[..., Any], rowwise: bool
) -> Node:
    """A call of a function, whose place `run` takes in the finished graph; until then any compiler can look inside."""

    def packed(*inputs: Any) -> Any:
        return function(*inputs)

    graph, call = function.graph, editor.known(value, packed, *inputs)
    call.meta |= {"rowwise": rowwise, "fresh": makes_results(graph), "bound": run, COMPUTES: (graph,)}
    call.meta["calls"] = sum(map(calls_of, graph.nodes))
    return call


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def bytes_of_row(node: Node, batch: Size) -> int:
    """Of one row of a result; sizes that depend on the inputs count as one."""
    value = node.meta["val"]
    sizes = [static(size) or 1 for size in value.shape if not same(size, batch)]
    return math.prod(sizes) * value.element_size()


def _stacked_at(pool: Pool) -> int:
    """Weights in front, as products in batches want them; columns behind the batch, where one call writes them."""
    return 0 if pool.kind == "state" else min(1, len(pool.shape))
