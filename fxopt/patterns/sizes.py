"""Sizes that are asked for more than once, of tensors nobody else needs, or for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import mutates
from fxopt.shape.calls import closure
from fxopt.shape.expressions import Computed, Sources, is_size, sizes_in
from fxopt.shape.sizes import at_most, expression, inferred, same, same_count, shape_of, static, tensor_of

aten = torch.ops.aten
Arguments = tuple[Any, ...]


def find_sizes(search: Search) -> Iterator[Match | Reject]:
    """At most two matches: calls that need fewer sizes when they are spelled otherwise ("spelled": node to its new
    arguments), and sizes to compute anew ("sizes": nodes; "counts": before and after; "sources")."""
    spelled = {node: arguments for node in search.graph.nodes if (arguments := respelled(node)) is not None}
    if spelled:
        yield Match(next(iter(spelled)), {"spelled": tuple(spelled.items())})
    sources = Sources(search.graph)
    needed = [node for node in sizes_in(search.graph) if _is_needed(node, spelled, sources)]
    before, after = _computation(needed), count(needed, sources)
    if after < len(before) or any(_asks_a_value(node) for node in before):
        yield Match(needed[0], {"sizes": tuple(needed), "counts": (len(before), after), "sources": sources})


def count(needed: list[Node], sources: Sources) -> int:
    """How many nodes compute these sizes from the inputs."""
    numbers = itertools.count()
    names: Computed[int] = Computed(sources, lambda node, dim: next(numbers), lambda *call: next(numbers))
    for node in needed:
        names.of(expression(node.meta["val"]))
    return next(numbers)


def _is_needed(node: Node, spelled: dict[Node, Arguments], sources: Sources) -> bool:
    """Whether something else than a size, or than a call that will do without it, uses a size that inputs give."""

    def uses(user: Node) -> bool:
        if user in spelled:
            return node in _nodes_in(spelled[user])
        return not is_size(user) or not sources.has(expression(user.meta["val"]))

    size = node.meta["val"]
    return static(size) is None and sources.has(expression(size)) and any(map(uses, node.users))


def _computation(needed: list[Node]) -> set[Node]:
    """The size nodes behind these, and they themselves."""

    def sizes(nodes: Iterable[Node]) -> Iterator[Node]:
        return (node for node in nodes if node.op == "call_function" and is_size(node))

    return closure(sizes(needed), lambda node: sizes(node.all_input_nodes))


def _asks_a_value(node: Node) -> bool:
    """Reads the size of a tensor that the graph computes, and so keeps it alive."""
    return any(argument.op != "placeholder" and not is_size(argument) for argument in node.all_input_nodes)


def _nodes_in(value: Any) -> set[Node]:
    found: set[Node] = set()
    torch.fx.node.map_arg(value, found.add)
    return found


def respelled(node: Node) -> Arguments | None:
    """Arguments with which a call gives the same tensor from fewer sizes; None where it is spelled well."""
    if node.op != "call_function" or is_size(node) or tensor_of(node) is None or mutates(node):
        return None
    if not any(map(is_size, node.all_input_nodes)):
        return None
    change = _SPELLINGS.get(node.target)
    arguments = torch.fx.node.map_arg(change(node) if change else node.args, _as_number)
    return None if _nodes_in(arguments) == _nodes_in(node.args) else arguments


def _as_number(node: Node) -> Node | int:
    known = static(node.meta["val"]) if is_size(node) else None
    return node if known is None else known


def _view(node: Node) -> Arguments:
    """view(x, [s0, 5]) is view(x, [-1, 5]). One dim is left to infer, and only among dims that are never 0: an empty
    tensor tells nothing about two.
    """
    source, sizes = node.args[0], shape_of(node)
    assert isinstance(source, Node)
    shape = inferred(sizes)
    return (source, shape) if shape and same_count(shape_of(source), sizes) else node.args


def _unflatten(node: Node) -> Arguments:
    source, dim, sizes = node.args
    assert isinstance(source, Node) and isinstance(dim, int) and isinstance(sizes, list | tuple)
    rank = len(shape_of(source))
    start = dim % rank
    cut = shape_of(node)[start : start + len(sizes)]
    shape = inferred(cut)
    return (source, dim, shape) if shape and same_count(shape_of(source)[start : start + 1], cut) else node.args


def _expand(node: Node) -> Arguments:
    """expand(x, [s0, 5]) of an x [s0, 1] is expand(x, [-1, 5])."""
    source, sizes = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(sizes, list | tuple)
    own, shape = shape_of(source), shape_of(node)
    new = len(shape) - len(own)
    kept = [
        -1 if isinstance(size, Node) and dim >= new and same(own[dim - new], shape[dim]) else size
        for dim, size in enumerate(sizes)
    ]
    return (source, kept)


def _slice(node: Node) -> Arguments:
    """slice(x, 0, 0, n) of an x that never has more than n rows goes to the end."""
    arguments: Arguments = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    source, dim, start, stop, step = arguments
    assert isinstance(source, Node) and isinstance(dim, int)
    if not isinstance(stop, Node) or not at_most(shape_of(source)[dim], stop.meta["val"]):
        return node.args
    return (source, dim, start or 0, 2**63 - 1, *([step] if step != 1 else []))


_SPELLINGS: dict[Any, Callable[[Node], Arguments]] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _view),
    aten.unflatten.int: _unflatten,
    **dict.fromkeys((aten.expand.default, aten.broadcast_to.default), _expand),
    aten.slice.Tensor: _slice,
}
