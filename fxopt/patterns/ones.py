"""Dims of size 1 that a model carries along behind its linears, as in x[B, D, 1] of cross networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.calls import is_pointwise
from fxopt.shape.sizes import Size, same_shape, same_sizes, shape_of, static, tensor_of
from fxopt.shape.view_operators import REGROUPS

aten = torch.ops.aten


def find_ones(search: Search) -> Iterator[Match | Reject]:
    """Pointwise operators on [B, D, 1] that can as well be computed on [B, D], and views there and back."""
    if search.changes_modes:
        return
    aliases = search.aliases
    for node in search.graph.nodes:
        if node.op != "call_function" or tensor_of(node) is None or aliases.edited(node):
            continue
        source = _there_and_back(node)
        if source is not None and not aliases.leaves(node):
            yield Match(node, {"source": source})
        elif _is_pointwise(node) and any(size == 1 for size in map(static, shape_of(node))):
            operands = {operand: _without(operand, node) for operand in node.all_input_nodes}
            if not any(map(aliases.edited, operands)) and any(map(_is_computed, operands.values())):
                tensors = (*operands, *filter(None, operands.values()))
                yield Match(node, {"operands": operands, "tensors": tensors})


def ones_of(shape: Sequence[Size], whole: Sequence[Size]) -> list[int]:
    """The dims of an operand that broadcasts to `whole` where that has size 1."""
    ones = [static(size) == 1 for size in whole][len(whole) - len(shape) :]
    return [dim for dim, one in enumerate(ones) if one]


def _without(operand: Node, node: Node) -> Node | None:
    """What `operand` is a view of, if that has its shape without the dims where `node` has size 1."""
    ones = ones_of(shape_of(operand), shape_of(node))
    wanted = [size for dim, size in enumerate(shape_of(operand)) if dim not in ones]
    return next((source for source in _behind(operand) if same_sizes(shape_of(source), wanted)), None)


def _behind(node: Node) -> Iterator[Node]:
    """What it is a view of, that is a view of, and so on."""
    while node.target in REGROUPS and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _there_and_back(node: Node) -> Node | None:
    """The source of a view of a view that has the shape of its source again, and only lost and won dims of size 1."""
    plain = [size for size in shape_of(node) if static(size) != 1]
    for source in _behind(node):
        if source is not node.args[0] and same_shape(source, node):
            return source
        if not same_sizes([size for size in shape_of(source) if static(size) != 1], plain):
            break
    return None


def _is_computed(source: Node | None) -> bool:
    return source is not None and (source.target is aten.linear.default or _is_pointwise(source))


def _is_pointwise(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_pointwise(node.target):
        return False
    return not node.target._schema.is_mutable and all(
        tensor_of(operand) is not None for operand in node.all_input_nodes
    )
