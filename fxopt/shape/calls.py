"""What a node calls, with what, and what that is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx import Node

T = TypeVar("T")
# The overloads that say one thing.
WHERES = (torch.ops.aten.where.self, torch.ops.aten.where.ScalarSelf, torch.ops.aten.where.ScalarOther)
FILLS = (torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor)
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


def arguments_of(node: Node) -> dict[str, object]:
    """Arguments by name, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(enumerate(node.args)) | dict(node.kwargs)  # type: ignore[arg-type,return-value]
    defaults = _defaults(node.target)
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


@cache
def _defaults(target: torch._ops.OpOverload) -> dict[str, object]:
    return {argument.name: argument.default_value for argument in target._schema.arguments}


def is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Whether its tag says so; torch 2.11 forgot one."""
    return torch.Tag.pointwise in target.tags or target is torch.ops.aten.leaky_relu.default


def packet_of(node: Node) -> Any:
    """The operator that a node calls, whichever overload; None where it calls none."""
    return getattr(node.target, "overloadpacket", None)


def name_of(node: Node) -> str:
    """Of the operator that a node calls, without its overload: "add"."""
    return str(packet_of(node) or node.target).split(".")[-1]


def only_user(node: Node) -> Node | None:
    """Where one node alone reads another: it."""
    (user, *others) = node.users or (None,)
    return None if others else user


def ancestors(values: Sequence[object], sizes: bool = True) -> set[Node]:
    """What values are computed from, themselves included; without `sizes` not what only tells its size."""
    nodes = (value for value in values if isinstance(value, Node))
    return closure(nodes, lambda node: node.all_input_nodes if sizes or node.target not in _SIZES else ())


def is_of_data(node: Node) -> bool:
    """Whether it is computed from an input, and not from weights and numbers alone."""
    return any(read.op == "placeholder" and "state" not in read.meta for read in ancestors([node]))


def closure(starts: Iterable[T], neighbours: Callable[[T], Iterable[T]]) -> set[T]:
    """The starts, their neighbours, theirs, and so on."""
    found = set(starts)
    unread = list(found)
    while unread:
        fresh = set(neighbours(unread.pop())) - found
        found |= fresh
        unread += fresh
    return found
