"""FBGEMM's lookup in quantized tables, behind its check of ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.shape.calls import arguments_of
from fxopt.shape.conditions import unless_bad
from fxopt.shape.sizes import tensor_of

aten = torch.ops.aten
_LOOKUP = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"
_INTEGERS = (torch.int32, torch.int64)


def find_table_batched(search: Search) -> Iterator[Match | Reject]:
    """Every lookup in tables of 2 to 32 bits on the CPU, with the check of its ids; the anchor is the lookup."""
    for node in calls_of_ours(search.graph, _LOOKUP):
        given: dict[str, Any] = arguments_of(node)
        reason = _not_served(given)
        check = None if reason else _check_of(given["indices"], given["offsets"])
        if reason or check is None:
            yield Reject(reason or "no check of its ids stands before it", node)
        else:
            bound = {**given, "check": check, "rows": check.args[1], "offsets": _uncast(given["offsets"])}
            yield search.unedited(Match(node, bound), node.all_input_nodes, node, "what it reads is edited in place")


def _not_served(given: dict[str, Any]) -> str:
    ids, weights = tensor_of(given["indices"]), given["indice_weights"]
    if ids is None or ids.device.type != "cpu":
        return "it does not run on the CPU"
    if given["max_float8_D"] or given["output_dtype"] != 0 or not given["row_alignment"]:
        return "a table is of float8, or its result is not float32"
    if ids.dtype not in _INTEGERS or (weights is not None and weights.meta["val"].dtype != torch.float32):
        return "its ids are not int32 or int64, or its weights not float32"
    return ""


def _check_of(ids: Node, offsets: Node) -> Node | None:
    asked = (user for user in ids.users if user.target is unless_bad)
    return next((node for node in asked if _is_bounds(node.args[0]) and node.args[2:4] == (ids, offsets)), None)


def _is_bounds(check: Any) -> bool:
    return check.name() == "fbgemm::bounds_check_indices"


def _uncast(offsets: Node) -> Node:
    """Offsets of either dtype do."""
    if offsets.target in (aten.to.dtype, aten._to_copy.default) and offsets.meta["val"].dtype == torch.int64:
        source: Any = offsets.args[0]
        return source if source.meta["val"].dtype == torch.int32 else offsets
    return offsets
