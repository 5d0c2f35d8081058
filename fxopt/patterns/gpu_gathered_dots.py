"""Dots of vectors on CUDA that one call of fxopt::columns wrote, which nobody else reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject, calls_of_ours, is_ours
from fxopt.shape.aliases import Aliases

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def find_gathered_dots(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `z`, the vectors, the `columns` that write them, and the arguments of the dots behind z (`rest`)."""
    aliases = Aliases(module.graph)
    for node in calls_of_ours(module.graph, "fxopt::gpu_dots") if inference else ():
        z, *rest = node.args
        columns = _columns_of(z)
        if columns is None:
            continue
        if edited := next(filter(aliases.edited, columns.all_input_nodes), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
        else:
            yield Match(node, {"z": z, "columns": columns, "rest": rest})


def _columns_of(z: Any) -> Node | None:
    """The call that wrote these vectors and nothing else."""
    while isinstance(z, Node) and len(z.users) == 1 and z.target in _VIEWS:
        z = z.args[0]
    if not isinstance(z, Node) or z.target is not operator.getitem or len(z.users) > 1:
        return None
    call = z.args[0]
    alone = isinstance(call, Node) and is_ours(call, "fxopt::columns") and len(call.users) == 1
    return call if alone and len(call.meta["val"]) == 1 else None  # type: ignore[return-value,union-attr]
