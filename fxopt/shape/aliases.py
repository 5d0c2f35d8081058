"""Which values share memory, and which of them are edited in place: the barrier every rewrite respects."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxopt.shape.calls import arguments_of, closure
from fxopt.shape.sizes import same_sizes, tensor_of
from fxopt.torch_internals.storage import shares_storage

# Return their input itself (in eval) although their schema does not say so.
DROPOUTS = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
}


_CASTS = frozenset(getattr(torch.ops.aten.to, name) for name in ("dtype", "device", "dtype_layout", "other"))
_GIVE_ON = _CASTS | DROPOUTS | {
    torch.ops.aten.contiguous.default, torch.ops.aten.type_as.default, torch.ops.aten.flatten.using_ints,
    torch.ops.aten.positive.default, torch.ops.aten.real.default, torch.ops.aten.resolve_conj.default,
    torch.ops.aten.resolve_neg.default, torch.ops.aten.atleast_1d.default, torch.ops.aten.atleast_2d.default,
    torch.ops.aten.atleast_3d.default,
}  # fmt: skip
_GIVE_LISTS_ON = {
    torch.ops.aten.broadcast_tensors.default, torch.ops.aten.atleast_1d.Sequence,
    torch.ops.aten.atleast_2d.Sequence, torch.ops.aten.atleast_3d.Sequence,
}  # fmt: skip
_NORMS = frozenset({torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default})


def mutates(node: Node) -> bool:
    """Whether a node writes to one of its arguments; an opaque module does what it did in the capture."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return bool(node.meta.get("edits") or _reaches_state(node))
    return bool(_written(node.target)) or _updates_statistics(node)


def leaves_a_trace(node: Node) -> bool:
    """Whether a call may do something that its caller can see besides its result: it writes, or is no operator."""
    return node.op == "call_module" or mutates(node)


def _updates_statistics(node: Node) -> bool:
    """A batch norm in training writes running_mean and running_var; its schema does not say so."""
    return node.target in _NORMS and bool(node.args[5]) and isinstance(node.args[3], Node)


def _reaches_state(node: Node) -> bool:
    """Whether an opaque module holds memory that the graph reads as well: it may write there, by whatever name."""
    return node.op == "call_module" and bool(node.meta.get("memory"))


_LAYERS = (torch.ops.aten.gru, torch.ops.aten.lstm, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu)
_DROPOUT_AT = {layer.input: 5 for layer in _LAYERS} | {layer.data: 6 for layer in _LAYERS}


def is_random(node: Node) -> bool:
    if _is_certain(node):
        return False
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_certain(node: Node) -> bool:
    """An attention or a recurrent layer without dropout, which torch tags as random all the same."""
    if (place := _DROPOUT_AT.get(node.target)) is not None:  # type: ignore[call-overload]
        dropout, train = node.args[place : place + 2]
        return bool(dropout == 0.0 or train is False)
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    return arguments_of(node)["dropout_p"] == 0.0


def has_effects(node: Node) -> bool:
    """Whether a call does more than give its value: it writes, raises on a condition, or advances a random state."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.is_impure()
    return _updates_statistics(node) or (_is_impure(node.target) and not _is_certain(node))


@functools.cache
def _is_impure(operator: torch._ops.OpOverload) -> bool:
    if operator is torch.ops.aten._assert_async.default:  # unknown to fx
        return True
    return operator._schema.is_mutable or Graph().call_function(operator).is_impure()


def is_pure(node: Node) -> bool:
    """Whether a node may be moved, merged with its twin, or dropped: an operator without effects."""
    if node.op != "call_function":
        return node.op == "get_attr"
    return not (has_effects(node) or is_random(node))


def edits_only(node: Node) -> bool:
    """Whether an operator does nothing besides its value but write to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and mutates(node) and not is_random(node)


class Aliases:
    """Groups of nodes that may share memory: by operator schemas, and by what the values themselves share.

    meta["memory"]: the pieces of memory that a placeholder or constant stood on in the capture, and those of them that
    an opaque module holds as well.
    """

    def __init__(self, graph: Graph | None = None) -> None:
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}  # by root
        self._edits: dict[Node, list[int]] = {}  # by root, places in the graph
        self._places: dict[Node, int] = {}
        self._leaving: set[Node] = set()
        self._memory: dict[int, Node] = {}
        for node in graph.nodes if graph is not None else ():
            self.add(node)

    def add(self, node: Node) -> None:
        """The next node in graph order."""
        self._parent[node], self._members[node] = node, [node]
        self._places[node] = len(self._places)
        for other in _aliased_arguments(node):
            self.join(node, other)
        for number in node.meta.get("memory", ()):
            self.join(self._memory.setdefault(number, node), node)
        for written in written_arguments(node):
            self._edits.setdefault(self._root(written), []).append(self._places[node])
        if node.op in ("output", "call_module"):
            self._leaving.update(map(self._root, node.all_input_nodes))

    def join(self, left: Node, right: Node) -> None:
        """These two share memory from now on."""
        root, child = self._root(left), self._root(right)
        if root is child:
            return
        if len(self._members[root]) < len(self._members[child]):
            root, child = child, root
        self._parent[child] = root
        self._members[root] += self._members.pop(child)
        if child in self._edits:
            self._edits.setdefault(root, []).extend(self._edits.pop(child))
        if child in self._leaving:
            self._leaving.add(root)

    def knows(self, node: Node) -> bool:
        """Whether it was in the graph when that was read."""
        return node in self._parent

    def edited(self, node: Node) -> bool:
        """Whether this value, or one that shares its memory, is edited in place anywhere in the graph."""
        return self._root(node) in self._edits

    def edits(self, node: Node) -> list[Node]:
        """What edits this value, or one that shares its memory, in place."""
        places = self._edits.get(self._root(node), ())
        nodes = list(self._places) if places else []
        return [nodes[place] for place in places]

    def edited_after(self, node: Node, place: Node) -> bool:
        """Whether the memory of `node` is edited later than at `place`: from there on, is its value what it was?"""
        return any(edit > self._places[place] for edit in self._edits.get(self._root(node), ()))

    def edited_inputs(self) -> list[Node]:
        """The placeholders and constants whose memory is edited."""
        return [node for node in self._parent if node.op in ("placeholder", "get_attr") and self.edited(node)]

    def leaves(self, node: Node) -> bool:
        """Whether this value, or one that shares its memory, reaches code that may edit it: returned, or handed to an
        opaque module.
        """
        return self._root(node) in self._leaving

    def is_kept(self, memory: Iterable[int]) -> bool:
        """Whether nothing so far edits these pieces of memory, or reaches code that may."""
        roots = {self._root(self._memory[number]) for number in memory if number in self._memory}
        return roots.isdisjoint(self._edits) and roots.isdisjoint(self._leaving)

    def owned(self, node: Node) -> bool:
        """Whether the graph made this memory: no input, no state, no constant, nothing an opaque module has seen."""
        return all(
            isinstance(member.target, torch._ops.OpOverload) or member.target is getitem
            for member in self.sharing(node)
        )

    def sharing(self, node: Node) -> list[Node]:
        """All nodes that may share memory with `node`, itself included."""
        return self._members[self._root(node)]

    def overlaps(self, edit: Node) -> bool:
        """Whether an edit may also read, through another argument, the memory that it writes."""
        written = written_arguments(edit)
        others = set(edit.all_input_nodes).difference(written)
        return any(not others.isdisjoint(self.sharing(one)) for one in written)

    def _root(self, node: Node) -> Node:
        while (parent := self._parent[node]) is not node:
            self._parent[node] = self._parent[parent]
            node = parent
        return node


def _aliased_arguments(node: Node) -> list[Node]:
    if node.op != "call_function":
        return list(node.all_input_nodes) if node.op == "call_module" else []
    if node.meta.get("fresh"):  # a function of ours, whose graph is known
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # getitem of a split, arithmetic on sizes
    if node.target in DROPOUTS:
        return list(node.all_input_nodes)
    declared = _nodes_at(node, _aliased(node.target))
    if node.target in _CASTS and declared and _is_new(node, declared[0]):
        return []
    return declared + undeclared_views(node)


def _is_new(cast: Node, source: Node) -> bool:
    """A cast to another dtype has memory of its own, whatever its schema allows for."""
    before, after = source.meta.get("val"), cast.meta.get("val")
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype


def views_behind(node: Node) -> set[Node]:
    """`node` and all that it may be a view of, and those a view of."""
    return closure([node], _aliased_arguments)


def find_views(graph: Graph) -> None:
    """Notes of each call which arguments its result is a view of, while their values are those of the capture."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            undeclared_views(node)


def undeclared_views(node: Node) -> list[Node]:
    """The arguments whose memory the result shares although no schema says so, as of einsum and meshgrid.

    Found once, by fake values, and kept in meta["views"] as places among the arguments: what stands there later may
    have a value of its own.
    """
    arguments: list[Node] = []
    map_arg((node.args, node.kwargs), arguments.append)
    if "views" not in node.meta:
        values = (argument.meta.get("val") for argument in arguments)
        node.meta["views"] = [at for at, value in enumerate(values) if _is_view_of(node.meta.get("val"), value)]
    return [arguments[at] for at in node.meta["views"]]


def _is_view_of(value: object, other: object) -> bool:
    """Whether two fake values, or a tensor in a list of them, share memory."""
    if isinstance(value, (list, tuple)):
        return any(_is_view_of(item, other) for item in value)
    if isinstance(other, (list, tuple)):
        return any(_is_view_of(value, item) for item in other)
    return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and shares_storage(value, other)


def makes_results(graph: Graph) -> bool:
    """Whether no result of the graph shares memory with one of its inputs."""
    aliases, (output,) = Aliases(graph), graph.find_nodes(op="output")
    shared = (other for result in output.all_input_nodes for other in aliases.sharing(result))
    return all(other.op == "call_function" or other is output for other in shared)


def is_view(node: Node) -> bool:
    """Whether it shares the memory of an argument, or may, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def is_handed_out(node: Node, *stand_ins: object) -> bool:
    """Whether the caller or an opaque module gets it, or what may be it: contiguous(), casts and edits give it on.

    Args:
        stand_ins: operators whose reading counts for the caller's.
    """
    return any(
        user.op in ("output", "call_module")
        or user.target in stand_ins
        or (_may_be(user, node) and is_handed_out(user, *stand_ins))
        for user in node.users
    )


def given_on(node: Node) -> list[Node]:
    """The arguments that a call may return as they are, the very tensor objects."""
    if node.target is not getitem:
        given = _tensors(node.args[:1]) if node.target in _GIVE_ON else []
        return [] if given and _is_new(node, given[0]) else given
    call: Node
    call, place = node.args  # type: ignore[assignment]
    return _tensors(call.args[0][place : place + 1]) if call.target in _GIVE_LISTS_ON else []  # type: ignore[index,operator,misc]


def _tensors(arguments: object) -> list[Node]:
    return [argument for argument in arguments if isinstance(argument, Node)]  # type: ignore[attr-defined]


def _may_be(user: Node, node: Node) -> bool:
    """Whether a call may return its argument itself, or that in another form of the same sizes, alone or in a list."""
    if user.target is getitem:
        return True
    made, given = user.meta.get("val"), tensor_of(node)
    every = made if isinstance(made, (list, tuple)) else [made]
    alike = (
        isinstance(one, torch.Tensor) and given is not None and same_sizes(one.shape, given.shape) for one in every
    )
    return any(alike) and node in _aliased_arguments(user)


def written_arguments(node: Node) -> list[Node]:
    """What a call edits in place."""
    if _updates_statistics(node):
        return [argument for argument in node.args[3:5] if isinstance(argument, Node)]
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*(node.all_input_nodes if node.meta.get("edits") else []), *([node] if _reaches_state(node) else [])]
    return _nodes_at(node, _written(node.target))


@functools.cache
def _aliased(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """The arguments that the result may share memory with, by the schema."""
    return tuple(argument.name for argument in operator._schema.arguments if argument.alias_info is not None)


@functools.cache
def _written(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """The arguments that are edited."""
    arguments = ((argument.name, argument.alias_info) for argument in operator._schema.arguments)
    return tuple(name for name, alias in arguments if alias is not None and alias.is_write)


def _nodes_at(node: Node, names: tuple[str, ...]) -> list[Node]:
    found: list[Node] = []
    if names:
        given: Any = arguments_of(node)
        map_arg([given[name] for name in names], found.append)
    return found
