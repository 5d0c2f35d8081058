"""The values of a topk, whose indices nobody reads (k-max pooling)."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.k_largest.serves import LONGEST_ON_CUDA, MOST
from fxopt.patterns.core import Match, Reject, devices
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import shape_of, static, tensor_of
from fxopt.shape.standing import analysed

aten = torch.ops.aten
_RISING = {aten.tanh.default, aten.sigmoid.default, aten.relu.default}


def find_k_largest(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """topk(x, k, dim)[0]. A rising function in front of it may as well be taken of the k values alone."""
    aliases = analysed(module.graph, Aliases)
    for node in module.graph.find_nodes(op="call_function", target=aten.topk.default):
        x, k, dim, largest, ordered = arguments_of(node).values()
        if not (isinstance(x, Node) and isinstance(k, int) and isinstance(dim, int) and largest and ordered):
            continue
        values = next(iter(node.users), None)
        if values is None or any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
            yield Reject("someone reads the indices of its topk", node)
        elif why := _why_not(x, k, dim, inference):
            yield Reject(why, node)
        elif len(node.users) > 1:
            yield Reject("its values are taken out of its result more than once", node)
        elif aliases.edited(x) or aliases.edited(values):
            yield Reject("what it reads or gives is edited in place", node)
        else:
            yield Match(values, {"x": x, "k": k, "dim": dim % len(shape_of(x)), "rising": _rising(x, aliases)})


def _why_not(x: Node, k: int, dim: int, inference: bool) -> str:
    """Why no kernel serves these lists; "": one does."""
    value = tensor_of(x)
    if value is None or value.dim() == 0:
        return "what it takes them of has no dims"
    if value.dtype != torch.float32 or not 1 <= k <= MOST:
        return f"its lists are no float32 with k from 1 to {MOST}"
    if value.device.type not in devices(inference):
        return f"on {value.device.type} it has no kernel" + ("" if inference else " with gradients")
    length = static(value.shape[dim])
    if value.is_cuda and (length is None or length > LONGEST_ON_CUDA):
        return f"on cuda its lists must have a length that is known and at most {LONGEST_ON_CUDA}"
    return ""


def _rising(x: Node, aliases: Aliases) -> Node | None:
    """What x is a rising function of, if nobody else needs x."""
    if x.target not in _RISING or len(x.users) > 1:
        return None
    source = x.args[0]
    if not isinstance(source, Node) or source.meta["val"].dtype != torch.float32 or aliases.edited(source):
        return None
    return source
