"""Index lists and masks whose content the graph fixes: literals, and what operators without inputs make of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxopt.shape.aliases import is_pure
from fxopt.shape.sizes import static
from fxopt.torch_internals.modes import no_dispatch_modes

_MOST_ELEMENTS = 1 << 16


def constant_tensor(node: object, held: Mapping[Node, Tensor] | None = None) -> Tensor | None:
    """The tensor that `node` is in every call; None where that is not known, or large.

    held: tensors to take as they are now: the answer is then true until one of them changes.
    """
    try:
        with no_dispatch_modes(), torch.no_grad():
            value = _content(node, dict(held or {}))
    except (_Unknown, RuntimeError, TypeError, ValueError, IndexError):
        return None
    return value if isinstance(value, Tensor) else None


class _Unknown(Exception):
    pass


def _content(argument: Any, known: dict[Node, Any]) -> Any:
    if not isinstance(argument, Node):
        if isinstance(argument, torch.SymInt):
            raise _Unknown
        return argument
    if argument not in known:
        known[argument] = _computed(argument, known)
    return known[argument]


def _computed(node: Node, known: dict[Node, Any]) -> Any:
    value = node.meta.get("val")
    if node.op == "get_attr" and node.meta.get("literal"):
        return getattr(node.graph.owning_module, str(node.target))
    if isinstance(value, torch.SymInt | int) and (size := static(value)) is not None:
        return size
    takes = node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
    if node.op != "call_function" or not takes or not is_pure(node) or _is_large(value):
        raise _Unknown
    args: Any = map_aggregate(node.args, lambda argument: _content(argument, known))
    kwargs: Any = map_aggregate(node.kwargs, lambda argument: _content(argument, known))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_large(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_large, value))
    if not isinstance(value, Tensor):
        return True
    sizes = map(static, value.shape)  # one that depends on data (nonzero) is at most its input's
    return math.prod(1 if size is None else size for size in sizes) > _MOST_ELEMENTS
