"""Two linear layers with nothing in between whose product is the smaller matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.linear_layers import sizes_fit
from fxopt.shape.sizes import is_float32, shape_of, static

aten = torch.ops.aten


def find_pairs(search: Search) -> Iterator[Match | Reject]:
    """linear(linear(x, [H, K]), [N, H]) with K N < H (K + N), where nobody else reads what the first one gives."""
    for second in search.calls(aten.linear.default):
        first = second.args[0]
        if not isinstance(first, Node) or first.target is not aten.linear.default:
            continue
        sizes = _sizes(first, second)
        if sizes is None:
            continue
        K, H, N = sizes
        if len(first.users) > 1:
            yield Reject("something else reads what the first of the two gives", first)
        elif K * N >= H * (K + N):
            yield Reject(f"their product [{N}, {K}] is more work than [{H}, {K}] and [{N}, {H}]", second)
        else:
            match = Match(second, {"first": first, "sizes": sizes})
            read = [*first.all_input_nodes, *second.all_input_nodes]
            yield search.unedited(match, read, second, "something that they read is edited in place")


def _sizes(first: Node, second: Node) -> tuple[int, int, int] | None:
    """K, H, N of two float32 matrices; in bfloat16 their product would round once more."""
    if not all(is_float32(node.args[1]) and sizes_fit(node) for node in (first, second)):
        return None
    (H, K), (N, _) = ([static(size) for size in shape_of(node.args[1])] for node in (first, second))  # type: ignore[arg-type]
    return (K, H, N) if K and H and N else None
