"""Gated recurrent units over whole sequences, as torch.nn.GRU calls them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import tensor_of
from fxopt.shape.standing import analysed

aten = torch.ops.aten


def find_recurrences(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """gru(x, initial, weights, ...), of one direction: its states, and the last ones."""
    aliases = analysed(module.graph, Aliases)
    for node in module.graph.find_nodes(op="call_function", target=aten.gru.input):
        found = arguments_of(node)
        if why := _obstacle(node, found, inference, aliases):
            yield Reject(why, node)
        else:
            params: list[Node] = list(found["params"])  # type: ignore[call-overload]
            each = 4 if found["has_biases"] else 2
            layers = (params[at : at + each] for at in range(0, len(params), each))
            weights = tuple((*layer, None, None)[:4] for layer in layers)
            bound = {"x": found["input"], "initial": found["hx"], "weights": weights}
            yield Match(node, {**bound, "batch_first": found["batch_first"]})


def _obstacle(node: Node, found: dict, inference: bool, aliases: Aliases) -> str:
    x = tensor_of(found["input"])
    if x is None or x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 3:
        return "expected float32 [B, L, I] on the CPU"
    if not inference:
        return "gradients are on, and the kernel has none"
    if found["bidirectional"] or (found["train"] and found["dropout"]):
        return "expected one direction, and no dropout between the layers"
    if any(user.target is not operator.getitem or aliases.edited(user) for user in node.users):
        return "its results are edited"
    return ""
