"""The values of a topk, whose indices nobody reads, or that are gathered in their places (k-max pooling)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Node

from fxopt.kernels.k_largest.serves import LONGEST_ON_CUDA, MOST
from fxopt.patterns.core import Match, Reject, Search, devices
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import is_float32, shape_of, static, tensor_of

aten = torch.ops.aten
_RISING = {aten.tanh.default, aten.sigmoid.default, aten.relu.default}


def find_k_largest(search: Search) -> Iterator[Match | Reject]:
    """topk(x, k, dim)[0], of which a rising function in front may as well be taken of the k values alone, and
    x.gather(dim, topk(x, k, dim)[1].sort(dim)[0])."""
    aliases = search.aliases
    for node in search.calls(aten.topk.default):
        x, k, dim, largest, ordered = arguments_of(node).values()
        if not (isinstance(x, Node) and isinstance(k, int) and isinstance(dim, int) and largest):
            continue
        dim %= max(1, len(shape_of(x)))
        gathered = _gathered(node, x, dim)
        values = gathered or next(iter(node.users), None)
        if gathered is None and not ordered:
            continue
        if values is None or (gathered is None and any(_takes(user) != 0 for user in node.users)):
            yield Reject("someone reads the indices of its topk", node)
        elif why := _why_not(x, k, dim, search.inference, placed=gathered is not None):
            yield Reject(why, node)
        elif gathered is None and len(node.users) > 1:
            yield Reject("its values are taken out of its result more than once", node)
        elif aliases.edited(x) or aliases.edited(values):
            yield Reject("what it reads or gives is edited in place", node)
        else:  # where a rising function is flat, others are among the k largest
            rising = None if gathered else _rising(x, aliases)
            yield Match(values, {"x": x, "k": k, "dim": dim, "rising": rising, "placed": gathered is not None})


def _takes(node: Node) -> object:
    """Which result it takes of a call that has several."""
    return node.args[1] if node.target is operator.getitem else None


def _gathered(topk: Node, x: Node, dim: int) -> Node | None:
    """The gather of x by the sorted indices of its topk, if nothing else is read of either."""
    indices = _only(topk.users, lambda user: _takes(user) == 1)
    ordered = indices and _only(indices.users, lambda user: user.target is aten.sort.default)
    taken = ordered and _only(ordered.users, lambda user: _takes(user) == 0)
    found = taken and _only(taken.users, lambda user: user.target is aten.gather.default)
    if not (ordered and found):
        return None
    _, along, descending = arguments_of(ordered).values()
    source, gathered_along, index, _ = arguments_of(found).values()
    rank, dims = len(shape_of(x)), (along, gathered_along)
    if descending or source is not x or index is not taken or not all(isinstance(d, int) for d in dims):
        return None
    return found if all(d % rank == dim for d in dims) else None  # type: ignore[operator]


def _only(users: Iterable[Node], fits: Callable[[Node], bool]) -> Node | None:
    found = list(users)
    return found[0] if len(found) == 1 and fits(found[0]) else None


def _why_not(x: Node, k: int, dim: int, inference: bool, placed: bool) -> str:
    """Why no kernel serves these lists; "": one does."""
    value = tensor_of(x)
    if value is None or value.dim() == 0:
        return "what it takes them of has no dims"
    if value.dtype != torch.float32 or not 1 <= k <= MOST:
        return f"its lists are no float32 with k from 1 to {MOST}"
    if value.device.type not in devices(inference and not placed):
        return f"on {value.device.type} it has no kernel" + (
            " for those in their places" if placed else "" if inference else " with gradients"
        )
    length = static(value.shape[dim])
    if value.is_cuda and (length is None or length > LONGEST_ON_CUDA):
        return f"on cuda its lists must have a length that is known and at most {LONGEST_ON_CUDA}"
    return ""


def _rising(x: Node, aliases: Aliases) -> Node | None:
    """What x is a rising function of, if nobody else needs x."""
    if x.target not in _RISING or len(x.users) > 1:
        return None
    source = x.args[0]
    return source if is_float32(source) and not aliases.edited(source) else None
