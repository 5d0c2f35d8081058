"""Weights that could be kept in fewer bits: those of wide linears, and tables that do not fit the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.patterns.linear_layers import sizes_fit
from fxopt.shape.sizes import shape_of, static, tensor_of

aten = torch.ops.aten
_SMALLEST = 1 << 14  # elements; below it a linear is the cost of its call
_SMALLEST_TABLE = 1 << 22  # bytes; a smaller one lies in the cache


def find_wide_linears(search: Search) -> Iterator[Match | Reject]:
    """linear(x, W, b) in fp32 on the CPU with W, a parameter or buffer, of at least 16,384 elements."""
    for node in search.calls(aten.linear.default):
        x, weight = node.args[:2]
        if not isinstance(weight, Node) or not _is_state(weight):
            continue
        sizes = [static(size) for size in shape_of(weight)]
        if None in sizes or not sizes_fit(node) or sizes[0] * sizes[1] < _SMALLEST:  # type: ignore[operator]
            continue
        if not search.inference:
            yield Reject("it is captured with gradients: weights in fewer bits serve inference alone", node)
        else:
            bias = node.args[2] if len(node.args) > 2 else None
            yield Match(node, {"x": x, "weight": weight, "bias": bias, "N": sizes[0], "K": sizes[1]})


def find_large_tables(search: Search) -> Iterator[Match | Reject]:
    """Calls of the columns with fp32 tables of 4 MiB and more, on either device."""
    for node in calls_of_ours(search.graph, "fxopt::columns"):
        tables: Any = node.args[1]
        large = [table for table in tables if _is_state(table, "cpu", "cuda") and _bytes(table) >= _SMALLEST_TABLE]
        if large and not search.inference:
            yield Reject("it is captured with gradients: rows in fewer bits serve inference alone", node)
        elif large:
            yield Match(node, {"large": tuple(dict.fromkeys(large))})


def _bytes(table: Node) -> int:
    return int(table.meta["val"].nbytes)


def _is_state(node: Node, *devices: str) -> bool:
    value = tensor_of(node)
    if value is None or "state" not in node.meta:
        return False
    return value.dtype == torch.float32 and value.device.type in (devices or ("cpu",)) and value.is_contiguous()
