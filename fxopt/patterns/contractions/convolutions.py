"""Convolutions with kernels of size 1: linears over the channels, one position at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import only_user
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.spelled import spelled

aten = torch.ops.aten
CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default}
_BETWEEN = {aten.relu.default, aten.gelu.default, aten.sigmoid.default, aten.tanh.default, aten.silu.default}


def find_convolutions(search: Search) -> Iterator[Match | Reject]:
    """Chains of conv1d or conv2d of kernel 1 and of activations, as in SASRec: each one read by the next one only."""
    taken: set[Node] = set()
    for node in search.graph.nodes:
        if node in taken or not _is_linear(node, search.aliases):
            continue
        chain = [node]
        while (following := _following(chain[-1], search.aliases)) is not None:
            chain.append(following)
        taken.update(chain)
        x: Any = node.args[0]
        weights = tuple(argument for each in chain for argument in each.args[1:3] if isinstance(argument, Node))
        yield Match(chain[-1], {"chain": tuple(chain), "reads": (x, *weights)})


def _is_linear(node: Node, aliases: Aliases) -> bool:
    if node.target not in CONVOLUTIONS or aliases.edited(node) or spelled(node) is None:
        return False
    weight: Any = node.args[1]
    plain = all(static(size) == 1 for size in shape_of(weight)[2:])
    return plain and None not in map(static, shape_of(weight)) and node.meta["val"].is_floating_point()


def _following(node: Node, aliases: Aliases) -> Node | None:
    user = only_user(node)
    if user is None or user.all_input_nodes.count(node) != 1 or user.args[0] is not node:
        return None
    return user if _is_linear(user, aliases) or (user.target in _BETWEEN and not aliases.edited(user)) else None
