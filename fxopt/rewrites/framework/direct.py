"""Last of all: every call by its shortest way.

`torch.ops.aten.mul.Tensor` goes through the generic binding, 1.3 us; `torch.mul` parses the same arguments in 0.9 us
(select 1.3 / 0.8, cat 1.8 / 0.9, linear 2.4 / 1.7). On graphs of hundreds of small operators that is what eager's own
spelling costs, and the difference between as fast as eager and slower. Operators of ours skip the dispatcher.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt.kernels.entry import picker
from fxopt.rewrites.framework.forks import lower_branches
from fxopt.rewrites.framework.in_place import reuse_memory
from fxopt.rewrites.framework.indexing import indexed
from fxopt.shape.aliases import mutates
from fxopt.torch_internals.graphs import known_weakly
from fxopt.torch_internals.labels import WHILE_PROFILED
from fxopt.torch_internals.operators import nn_bindings
from fxopt.torch_internals.tracing import LazyGraphModule

aten = torch.ops.aten
_MANY = 64
_NOT_OF_USERS = ("aten", "prims", "fxopt")
_METHODS = {
    aten.to.dtype: torch.Tensor.to,
    aten.to.device: torch.Tensor.to,
    aten.sym_numel.default: torch.Tensor.numel,
    aten.item.default: torch.Tensor.item,
    **WHILE_PROFILED,
}
_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType)

# Operators whose Python binding takes the overload's arguments in the overload's order, by where the binding lives.
# Only bindings in C count: torch.einsum, torch.split and their kin are Python functions with arguments of their own.
_HOMES = {
    torch: "add sub mul div pow neg abs exp log log1p expm1 sqrt rsqrt square reciprocal relu sigmoid tanh softmax "
    "log_softmax cat stack select narrow unsqueeze squeeze transpose permute flatten reshape sum mean amax amin cumsum "
    "bmm mm matmul addmm embedding index_select gather batch_norm layer_norm dropout prelu where masked_fill "
    "eq ne lt le gt ge clamp bucketize remainder floor_divide conv1d conv2d "
    "zeros ones full zeros_like ones_like full_like arange unbind split_with_sizes t topk maximum minimum "
    "clone scatter index_add",
    torch.Tensor: "view expand repeat contiguous new_zeros new_ones new_full "
    "add_ sub_ mul_ div_ pow_ neg_ exp_ log_ log1p_ sqrt_ relu_ sigmoid_ tanh_ clamp_ masked_fill_ "
    "copy_ fill_ scatter_ index_add_",
    nn_bindings: "linear gelu silu leaky_relu",
}


def direct(module: GraphModule, inference: bool = False, states: int = 0) -> None:
    """Point each call of `module`'s graph at the shortest way; values stay the same to the bit. The first `states`
    placeholders are the model's state."""
    lower_branches(module.graph)
    if inference:
        reuse_memory(module.graph)  # after it: what stands between two calls may run beside them
    many = _pick_long_lists(module.graph, states)
    for node in module.graph.find_nodes(op="call_function", target=aten.unbind.int):
        _read_at_once(node)
    for node in module.graph.nodes:
        if "bound" in node.meta:
            bound = node.meta["bound"]
            node.target = bound if hasattr(bound, "__name__") else bound.__call__  # generated code calls by names
        elif indexed(node):
            continue
        elif node.target is aten.sym_size.int:
            _as_attribute(node)
        elif node.target in _METHODS:
            node.target = _METHODS[node.target]
        elif isinstance(node.target, torch._ops.OpOverload):
            node.target = _bindings().get(node.target.overloadpacket, node.target)
    module.recompile()
    LazyGraphModule.force_recompile(module)  # its forward runs from here on
    if many:
        module.forward = OfMany(module.forward, states)


class OfMany:
    """A graph's function of thousands of arguments, which it takes as two lists."""

    def __init__(self, serve: Callable[[Sequence[Any], Sequence[Any]], Any], states: int) -> None:
        self.serve, self._states = serve, states

    def __call__(self, *values: Any) -> Any:
        return self.serve(values[: self._states], values[self._states :])


def copied(module: GraphModule, less: Iterable[Node] = (), results: Sequence[Any] | None = None) -> GraphModule:
    """The same graph module with a graph of its own, compiled where it runs; fake values and constants are shared.

    Args:
        less: calls that the copy leaves out, users first.
        results: what it returns, if not the same.
    """
    graph, copies = Graph(), dict[Node, Node]()
    output: Any = graph.graph_copy(module.graph, copies, return_output_node=True)
    for node in less:
        graph.erase_node(copies[node])
    graph.output(output[0] if results is None else map_arg(tuple(results), copies.__getitem__))
    return known_weakly(LazyGraphModule(module, graph))


def as_function(graph: Graph, inference: bool = False) -> Callable[..., Any]:
    """A graph without state of its own as a function, each call by its shortest way; the graph stays as it is."""
    twin = Graph()
    twin.output(twin.graph_copy(graph, {}))
    fast = LazyGraphModule(torch.nn.Module(), twin)
    direct(fast, inference)
    type(fast).forward.__module__ = __name__  # generated code that calls it asks where it is from
    return fast.forward


def _pick_long_lists(graph: Graph, states: int) -> bool:
    """Thousands of arguments as two: naming, listing and dropping 2900 of them takes 37 us, picking them 4."""
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) < _MANY:
        return False
    with graph.inserting_before(placeholders[0]):
        lists = graph.placeholder("state"), graph.placeholder("inputs")
    position = {node: number for number, node in enumerate(placeholders)}
    looked = True  # what the check of the call has seen still holds
    for node in graph.nodes:
        if node.op == "call_function":
            in_place = looked and getattr(node.meta.get("bound"), "reads_in_place", False)
            node.args = tuple(_picked(graph, node, argument, lists, position, in_place) for argument in node.args)
        looked = looked and not _may_move_tensors(node)
    for node, number in position.items():
        if node.users:
            source = (lists[0], number) if number < states else (lists[1], number - states)
            with graph.inserting_after(lists[1]):
                node.replace_all_uses_with(graph.call_function(operator.getitem, source))
        graph.erase_node(node)
    return True


def _may_move_tensors(node: Node) -> bool:
    """Whether a call may give tensors other memory: code of a user, be it an operator, and what edits tensors."""
    if node.op in ("placeholder", "get_attr"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in _NOT_OF_USERS or mutates(node)
    return getattr(node.target, "__module__", "") != "_operator"


def _picked(
    graph: Graph, node: Node, argument: Any, lists: tuple[Node, Node], position: dict[Node, int], in_place: bool
) -> Any:
    """`argument`, or where it is a long list of nodes, one call that picks it from the lists and other values."""
    if (
        not isinstance(argument, list | tuple)
        or len(argument) < _MANY
        or not all(isinstance(n, Node) for n in argument)
    ):
        return argument
    others = [item for item in dict.fromkeys(argument) if item not in position]
    place = position | {item: len(position) + number for number, item in enumerate(others)}
    pick = picker([place[item] for item in argument], in_place)

    def picked(*values: Any) -> Sequence:
        return pick(*values)

    with graph.inserting_before(node):
        return graph.call_function(picked, (*lists, *others))


def _read_at_once(unbind: Node) -> None:
    """[part.item() for part in x.unbind()] as x.tolist(): 26 lengths of bags take 39 us one by one, 0.3 us at once."""
    source: Any = unbind.args[0]
    items = {item: part.args[1] for part in unbind.users for item in part.users if item.target is aten.item.default}
    if len(items) < 2 or source.meta["val"].dim() != 1:
        return
    order = list(unbind.graph.nodes)
    first, *_, last = sorted(items, key=order.index)
    if any(map(mutates, order[order.index(unbind) : order.index(last)])):
        return
    with unbind.graph.inserting_before(first):
        values = unbind.graph.call_function(torch.Tensor.tolist, (source,))
    for item, number in items.items():
        item.target, item.args = operator.getitem, (values, number)
    for node in (*unbind.users, unbind):
        if not node.users:
            unbind.graph.erase_node(node)


def _as_attribute(node: Node) -> None:
    """sym_size(x, 0) as x.shape[0]: 0.07 us, as x.size(0) 0.13 us, by its name 0.8 us."""
    source, dim = node.args
    with node.graph.inserting_before(node):
        shape = node.graph.call_function(getattr, (source, "shape"))
    node.target, node.args = operator.getitem, (shape, dim)


@functools.cache
def _bindings() -> dict[Any, Callable[..., Any]]:
    found = {getattr(aten, name): getattr(home, name) for home, names in _HOMES.items() for name in names.split()}
    return {packet: binding for packet, binding in found.items() if isinstance(binding, _IN_C)}
