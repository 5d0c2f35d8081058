"""Linear layers, with the ReLU behind them if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import shape_of, static, tensor_of

aten = torch.ops.aten
_RELUS = (aten.relu.default, aten.relu_.default)


def find_linears(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """linear(x, W, b), or relu(linear(x, W, b)) where nothing else reads the linear's result."""
    aliases = Aliases(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
        if not isinstance(weight, Node):
            continue
        if tensor_of(weight) is None or not _is_plain(weight):
            yield Reject("its weight is not a contiguous fp32 matrix on the CPU", node)
            continue
        relu = _relu_behind(node, aliases)
        N, K = (static(size) for size in shape_of(weight))
        yield Match(relu or node, {"x": x, "weight": weight, "bias": bias, "relu": relu is not None, "K": K, "N": N})


def _is_plain(weight: Node) -> bool:
    value = weight.meta["val"]
    return value.dtype == torch.float32 and value.device.type == "cpu" and value.dim() == 2 and value.is_contiguous()


def _relu_behind(node: Node, aliases: Aliases) -> Node | None:
    """The one user, if it is a ReLU and what the linear reads is the same there."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.target not in _RELUS:
        return None
    return user if node.next is user or not any(map(aliases.edited, node.all_input_nodes)) else None
