"""Instances of TorchRec's classes made of their attributes alone.

Their metaclass looks for proxies of torch.fx among the arguments of every constructor, which takes 1.7 us for each of
the JaggedTensors that a collection returns. Two instances from the function that the class registered show what it
makes of its children; a further one needs 0.4 us.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxopt.reach.held import slots_of


def attributes_of(kind: type, context: Any, count: int) -> dict[str, int | tuple[Any]] | None:
    """What each attribute of an instance is: the number of a child, or (a constant,).

    Args:
        kind: registered as a pytree.
        context: of its TreeSpec; count: of its children.

    Returns:
        None where the constructor does more than to keep its arguments, or where the class is none of TorchRec's.
    """
    if not kind.__module__.startswith("torchrec.") or kind.__new__ is not object.__new__:
        return None
    if kind.__setattr__ is not object.__setattr__ or slots_of(kind):
        return None
    (one, first), (other, second) = _probe(kind, context, count), _probe(kind, context, count)
    found: dict[str, int | tuple[Any]] = {}
    for name, value in one.items():
        child = next((i for i in range(count) if value is first[i] and other[name] is second[i]), None)
        if child is None and value is not other[name]:
            return None
        found[name] = (value,) if child is None else child
    return found


def instance(kind: type, attributes: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__ = attributes
    return made


def _probe(kind: type, context: Any, count: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The attributes of an instance, and the children that it is made of."""
    children = [torch.empty(0, dtype=torch.int64, device="cpu") for _ in range(count)]
    return dict(vars(pytree.SUPPORTED_NODES[kind].unflatten_fn(list(children), context))), children
