"""The values of a topk, whose indices nobody reads (k-max pooling)."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import shape_of, static, tensor_of
from fxopt.shape.standing import analysed

aten = torch.ops.aten
MOST = 64  # numbers of a list that are kept in order, one after the other
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
        elif not _fits(x, k, dim) or len(node.users) > 1 or aliases.edited(x) or aliases.edited(values):
            yield Reject(f"its lists are no float32 on the CPU with k from 1 to {MOST}", node)
        else:
            yield Match(values, {"x": x, "k": k, "dim": dim % len(shape_of(x)), "rising": _rising(x, aliases)})


def _fits(x: Node, k: int, dim: int) -> bool:
    value = tensor_of(x)
    if value is None or value.dtype != torch.float32 or value.device.type != "cpu" or value.dim() == 0:
        return False
    length = static(value.shape[dim])
    return 1 <= k <= MOST and (length is None or k <= length)


def _rising(x: Node, aliases: Aliases) -> Node | None:
    """What x is a rising function of, if nobody else needs x."""
    if x.target not in _RISING or len(x.users) > 1:
        return None
    source = x.args[0]
    return source if isinstance(source, Node) and not aliases.edited(source) else None
