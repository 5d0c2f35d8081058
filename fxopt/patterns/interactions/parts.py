"""Vectors that are joined only for an interaction: it reads them where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxopt.patterns.cats import Join
from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.shape.sizes import shape_of

aten = torch.ops.aten
_MOST_PARTS = 64  # each costs a call as much as an argument does


def find_parts(search: Search) -> Iterator[Match | Reject]:
    """Dot interactions of a cat or stack of [B, F, D] on F that nothing else reads."""
    for node in calls_of_ours(search.graph, "fxopt::dot_interaction"):
        vectors = node.args[0]
        if not isinstance(vectors, list | tuple) or len(vectors) != 1 or not isinstance(vectors[0], Node):
            continue
        join = Join.of(vectors[0])
        if join is None or join.dim != 1 or len(join.node.users) > 1 or len(join.inputs) > _MOST_PARTS:
            continue
        parts = tuple(map(_without_unsqueeze, join.inputs))
        read = (join.node, *join.inputs, *parts)
        yield search.unedited(Match(node, {"parts": parts}), read, node, "its vectors are edited in place")


def _without_unsqueeze(part: Node) -> Node:
    """[B, D] of [B, 1, D]."""
    source = part.args[0] if part.target is aten.unsqueeze.default and part.args[1] in (1, -2) else None
    return source if isinstance(source, Node) and len(shape_of(source)) == 2 else part
