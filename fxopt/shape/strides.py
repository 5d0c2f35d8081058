"""What is known of a tensor's strides whatever the inputs' are, and what the graph asks of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch.fx import Graph, Node

from fxopt.shape.aliases import DROPOUTS, is_random
from fxopt.shape.calls import closure, is_pointwise
from fxopt.shape.sizes import Size, expression, product, same, shape_of, static, tensor_of
from fxopt.shape.spelled import spelled
from fxopt.shape.view_operators import CUTS, EXPANSIONS, REGROUPS
from fxopt.torch_internals.storage import shares_storage
from fxopt.torch_internals.symbols import unless_empty

aten = torch.ops.aten


class Layout(IntEnum):
    """How much of the strides. ORDERED: an outer axis never has the smaller stride, so that what is computed pointwise
    is contiguous; a slice of a contiguous tensor is.
    """

    ANY = 0
    ORDERED = 1
    CONTIGUOUS = 2


_FRESH = {
    aten.linear.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.embedding.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros.default, aten.ones.default,
    aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.cumsum.default,
    aten.repeat.default, aten.softmax.int, aten.log_softmax.int, aten.layer_norm.default, aten.bilinear.default,
    aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor, aten.index_select.default, aten.gather.default,
    aten.tril.default, aten.triu.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default,
    aten.masked_select.default, aten.topk.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
}  # fmt: skip
_JOINS = {aten.cat.default, aten.stack.default}
# The result's strides follow from its shape, and nothing but the values of the arguments is read.
_STRIDE_BLIND = _FRESH | {
    aten.matmul.default, aten.tensordot.default, aten.contiguous.default, aten.one_hot.default,
    aten.item.default, aten.sym_size.int, aten.sym_numel.default, aten.embedding_bag.padding_idx,
    aten.embedding_bag.default,
}  # fmt: skip
_IMAGES = 4  # axes, or 5: channels may come last
_ALIKE = REGROUPS | {aten.alias.default, aten.lift_fresh.default}
# Views where the strides of their argument allow it, and copies elsewhere.
MAY_COPY = {
    aten.reshape.default, aten.flatten.using_ints, aten.reshape_as.default, aten.contiguous.default,
}  # fmt: skip
_UNTAGGED = {  # pointwise, although their tags do not say so
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.rsub.Tensor, aten.prelu.default,
    aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Tensor, aten.hardswish.default,
    aten.log_sigmoid.default,
}  # fmt: skip
_REDUCTIONS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.linalg_vector_norm.default, aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction,
}  # fmt: skip
# These fail, warn or read other memory where the strides of their argument are not what they were.
_STRICT = {
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.unflatten.int, aten.view_as.default,
    aten.as_strided.default, aten.view_as_complex.default, aten.sym_stride.int, aten.bucketize.Tensor,
    aten.searchsorted.Tensor,
}  # fmt: skip


class Strides:
    """Strides of one graph's tensors.

    Args:
        given: what is known of its inputs, where it is a part of another graph; by default nothing.
        within: whether it is one that a function of another graph runs, which tells later what it asks of the results.
    """

    def __init__(self, graph: Graph, given: Sequence[Layout] = (), within: bool = False) -> None:
        self._known: dict[Node, Layout] = {}
        self._asked: dict[Node, Layout] = {}
        self._inside: dict[Node, list[Strides]] = {}
        self._asked_inside: dict[Node, dict[Node, Layout]] = {}
        inputs = graph.find_nodes(op="placeholder")
        self._given = dict(zip(inputs, given, strict=True)) if len(given) == len(inputs) else {}
        for node in graph.nodes:
            self._inside[node] = self._graphs_of(node)
            self._known[node] = self._known_of(node)
        if not within:
            self._ask(Layout.CONTIGUOUS)

    def _ask(self, wanted: Layout) -> None:
        """From the graph's results on, of which `wanted` is asked."""
        for node in reversed(self._known):
            asked = (wanted if user.op == "output" else self._asked_by(user, node) for user in node.users)
            self._asked[node] = max(asked, default=Layout.ANY)
            self._asked_inside[node] = self._asked_by_graphs(node)

    @classmethod
    def as_captured(cls, graph: Graph) -> Strides:
        """Where the inputs lie as those did that it was captured with: what is likely, and not what holds."""
        inputs = graph.find_nodes(op="placeholder")
        whole = [tensor_of(node) is not None and looks_contiguous(node) for node in inputs]
        return cls(graph, [Layout.CONTIGUOUS if each else Layout.ANY for each in whole])

    def known(self, node: Node) -> Layout:
        """What holds whatever the strides of the model's inputs and parameters are."""
        return self._known[node]

    def asked(self, node: Node) -> Layout:
        """What must stay as it is, because an operator depends on the strides, or they leave the model."""
        return self._asked[node]

    def may_become(self, node: Node, other: Node) -> bool:
        """Whether nothing can tell the strides of `node` from those of `other`, a tensor of the same values."""
        return self._asked[node] <= min(self._known[node], self._known[other])

    def may_refuse(self, node: Node) -> bool:
        """Whether a view may fail, because what it is of need not be contiguous: it has more than one axis to merge."""
        if node.target not in _STRICT or not isinstance(source := node.args[0], Node):
            return False
        axes = sum(static(size) != 1 for size in shape_of(source))
        return axes > 1 and self._known[source] is not Layout.CONTIGUOUS

    def _known_of(self, node: Node) -> Layout:
        if tensor_of(node) is None:
            return self._known_of_pieces(node)
        rank = sum(static(size) != 1 for size in shape_of(node))
        least = Layout.ORDERED if rank <= 1 else Layout.ANY
        if node.op != "call_function":
            return max(least, self._given.get(node, least))
        return max(least, self._known_of_call(node))

    def _known_of_pieces(self, node: Node) -> Layout:
        if node.target in CUTS:
            return min(self._known[node.args[0]], Layout.ORDERED)  # type: ignore[index]
        fresh = node.target in _FRESH or _is_ours(node)
        return self._known_of_graphs(node) or (Layout.CONTIGUOUS if fresh else Layout.ANY)

    def _known_of_graphs(self, node: Node) -> Layout:
        """Of a function whose graphs are known: of the one that runs, whichever that is."""
        return min((inside.known_of_outputs() for inside in self._inside[node]), default=Layout.ANY)

    def _graphs_of(self, node: Node) -> list[Strides]:
        """The strides within each of the graphs that a function may run."""
        graphs = [part for part in node.meta.get("computes", ()) if isinstance(part, Graph)]
        if not graphs:
            return []
        given = [self._known[argument] if isinstance(argument, Node) else Layout.ANY for argument in node.args]
        return [Strides(graph, given, within=True) for graph in graphs]

    def _asked_by_graphs(self, node: Node) -> dict[Node, Layout]:
        """What a function whose graphs are known asks of its arguments: the most that any of the graphs does."""
        asked: dict[Node, Layout] = {}
        for inside in self._inside[node]:
            inside._ask(self._asked[node])
            for argument, layout in zip(node.args, inside.asked_of_inputs(), strict=True):
                if isinstance(argument, Node):
                    asked[argument] = max(layout, asked.get(argument, layout))
        return asked

    def known_of_outputs(self) -> Layout:
        """The least that holds of the graph's results, as :meth:`known`."""
        (output,) = (node for node in self._known if node.op == "output")
        return min((self._known[node] for node in output.all_input_nodes), default=Layout.ANY)

    def asked_of_inputs(self) -> list[Layout]:
        """What the graph asks of each of its inputs, as :meth:`asked`."""
        return [layout for node, layout in reversed(self._asked.items()) if node.op == "placeholder"]

    def _known_of_call(self, node: Node) -> Layout:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem:
            return self._known[source]  # type: ignore[index]
        if node.target in _FRESH or _is_ours(node):
            return Layout.CONTIGUOUS
        if node.target in _JOINS and len(shape_of(node)) < _IMAGES:
            return Layout.CONTIGUOUS
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._known_of_graphs(node)
        if not isinstance(source, Node) or node.kwargs.get("memory_format") is not None:
            return Layout.ANY
        if node.target is aten.contiguous.default:
            return Layout.CONTIGUOUS
        if node.target in _ALIKE:
            return self._known[source]
        if node.target is aten.batch_norm.default and len(shape_of(node)) < _IMAGES:
            return Layout.CONTIGUOUS
        if node.target in CUTS or node.target in EXPANSIONS:  # a stride of 0 decides nothing
            return min(self._known[source], Layout.ORDERED)
        if node.target is aten.matmul.default:
            return Layout.CONTIGUOUS if _multiplies_in_order(node) else Layout.ANY
        if node.target in _REDUCTIONS:
            return Layout.CONTIGUOUS if self._known[source] is Layout.CONTIGUOUS else Layout.ANY
        if _is_pointwise(node):
            tensors = [argument for argument in node.all_input_nodes if tensor_of(argument) is not None]
            ordered = all(self._known[argument] >= Layout.ORDERED for argument in tensors)
            return Layout.CONTIGUOUS if tensors and ordered else Layout.ANY
        return Layout.ANY

    def _asked_by(self, user: Node, node: Node) -> Layout:
        if user.op != "call_function" or user.target in _STRICT or _draws_for_each(user):
            return Layout.CONTIGUOUS
        if not isinstance(user.target, torch._ops.OpOverload):
            return self._asked_inside[user].get(node, self._asked[user])
        if user.target is aten.contiguous.default and self._known[user.args[0]] is Layout.CONTIGUOUS:  # type: ignore[index]
            return self._asked[user]  # it may go, because its argument is what it is
        if _is_fresh(user):
            return Layout.ANY
        if user.target.namespace != "aten":  # a kernel we do not know may insist on what it gets
            return Layout.CONTIGUOUS
        if _is_pointwise(user):
            return min(self._asked[user], Layout.ORDERED)
        if user.target in _ALIKE:
            return self._asked[user]
        return Layout.CONTIGUOUS if self._asked[user] and not _is_scalar(user) else Layout.ANY


def _draws_for_each(node: Node) -> bool:
    """Whether it draws a number for each element, in the order in which they lie: a dropout in training."""
    kept = node.target in DROPOUTS and (node.args[1] == 0.0 or not node.args[2])
    return is_random(node) and not kept


def _multiplies_in_order(matmul: Node) -> bool:
    """A matrix by a stack of matrices is computed as (stack.mT @ matrix.mT).mT, whose result is a transpose; how one by
    a sparse constant lies, which has no fake value, is not known.
    """
    left, right = (tensor_of(operand) for operand in matmul.args)  # type: ignore[arg-type]
    return left is not None and right is not None and (right.dim() <= 2 or left.dim() > 2)


def is_matrix_product(node: Node) -> bool:
    """Whether it is an einsum whose last product sums at all sizes, so that its strides follow from its shape.

    Others are pointwise, or views: what one operand has alone is summed before the operands are multiplied, and a sum
    over a dim of size 1 is none.
    """
    call = spelled(node) if node.target is aten.einsum.default else None
    if call is None or len(call.operands) < 2:
        return False
    *first, last = [
        {letter for letter, size in zip(letters, shape_of(operand), strict=True) if (static(size) or 1) > 1}
        for operand, letters in call.operands
    ]
    return not last & set().union(*first) <= set(call.out)


def lies_by_sizes(node: Node) -> bool:
    """Whether it is an einsum that lies in its own order at some sizes, and in that of its operands where what it sums
    has size 1.
    """
    call = spelled(node) if node.target is aten.einsum.default else None
    if call is None or is_matrix_product(node):
        return False
    kept = [[call.out.index(letter) for letter in letters if letter in call.out] for _, letters in call.operands]
    ordered = all(places == sorted(places) for places in kept)
    return not (ordered and all(looks_contiguous(operand) for operand, _ in call.operands))


def looks_contiguous(node: Node) -> bool:
    """Whether it is contiguous where the model's inputs are."""
    value, expected = node.meta["val"], product(())
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if static(size) == 1:
            continue
        if not same_stride(stride, expected):
            return False
        expected = expected * size
    return True


def lies_alike(left: Node, right: Node) -> bool:
    """Whether two tensors of one shape have the same fake strides, but for those of dims of size 1."""
    strides = zip(shape_of(left), left.meta["val"].stride(), right.meta["val"].stride(), strict=True)
    return all(same(size, 1) or same(one, other) for size, one, other in strides)


def surely_lies_alike(left: Node, right: Node) -> bool:
    """Whether their real strides are the same as well, which matters where reshapes have been added."""
    return lies_alike(left, right) and not is_guess(left) and not is_guess(right)


def is_guess(node: Node) -> bool:
    """Whether the real strides may be others than the fake ones: a fake reshape copies wherever torch cannot prove that
    a view will do, as where a stride is Max(1, F) and the size F.
    """
    calls = closure([node], lambda made: () if made.op != "call_function" or _is_fresh(made) else made.all_input_nodes)
    return any(made.target in MAY_COPY and not (_is_fresh(made) or _is_sure(made)) for made in calls)


def _is_sure(reshape: Node) -> bool:
    """Whether it is a view, or a copy of what has the same strides."""
    source = reshape.all_input_nodes[0]
    return shares_storage(reshape.meta["val"], source.meta["val"]) or looks_contiguous(source)


def _is_fresh(node: Node) -> bool:
    """Whether its strides follow from its shape."""
    joins = node.target in _JOINS and len(shape_of(node)) < _IMAGES
    return joins or node.target in _STRIDE_BLIND or _is_ours(node) or is_matrix_product(node)


def same_stride(left: Size, right: Size) -> bool:
    """Whether two strides are equal but for empty tensors: 676 * Max(1, s0), since torch counts an empty dim as one."""
    return same(left, right) or unless_empty(expression(left)) == unless_empty(expression(right))


def reads_once(node: Node) -> bool:
    """Whether a node passes over its arguments once, so that their strides cost it next to nothing."""
    return _is_pointwise(node) or node.target in _JOINS


def _is_scalar(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() == 0


def _is_pointwise(node: Node) -> bool:
    """A cast to another dtype is one too; an edit in place has the strides of what it edits."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if is_pointwise(node.target) or node.target in _UNTAGGED:
        return True
    return node.target is aten.to.dtype and _is_new(node)


def _is_new(cast: Node) -> bool:
    source = cast.args[0]
    return isinstance(source, Node) and cast.meta["val"].dtype != source.meta["val"].dtype


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fxopt"
