"""Gated recurrent units over whole sequences, as torch.nn.GRU calls them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import is_float32

aten = torch.ops.aten


def find_recurrences(search: Search) -> Iterator[Match | Reject]:
    """gru(x, initial, weights, ...), of one direction: its states, and the last ones. x is padded or packed."""
    for node in search.graph.nodes:
        if node.target not in (aten.gru.input, aten.gru.data):
            continue
        found = arguments_of(node)
        x = found["input" if node.target is aten.gru.input else "data"]
        if why := _obstacle(node, x, found, search.inference, search.aliases):
            yield Reject(why, node)
        else:
            params: list[Node] = list(found["params"])  # type: ignore[call-overload]
            each = 4 if found["has_biases"] else 2
            layers = (params[at : at + each] for at in range(0, len(params), each))
            weights = tuple((*layer, None, None)[:4] for layer in layers)
            bound: dict[str, Any] = {"x": x, "initial": found["hx"], "weights": weights}
            yield Match(node, bound | {key: found[key] for key in ("batch_first", "batch_sizes") if key in found})


def _obstacle(node: Node, x: Any, found: dict, inference: bool, aliases: Aliases) -> str:
    if not is_float32(x, "cpu", rank=3 if node.target is aten.gru.input else 2):
        return "expected float32 [B, L, I], or packed sequences of it, on the CPU"
    if not inference:
        return "gradients are on, and the kernel has none"
    if found["bidirectional"] or (found["train"] and found["dropout"]):
        return "expected one direction, and no dropout between the layers"
    if any(user.target is not operator.getitem or aliases.edited(user) for user in node.users):
        return "its results are edited"
    return ""
