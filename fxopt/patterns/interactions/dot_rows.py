"""Dots of pairs of vectors on CUDA, in one row with what stands before them: [before, z z^T [:, i, j]]."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.interactions.serves import HALVES
from fxopt.patterns.core import Match, Reject, Search, calls_of_ours, is_ours
from fxopt.shape.sizes import shape_of, static, tensor_of
from fxopt.shape.view_operators import joined_dim

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)


def find_rows(search: Search, dtypes: Sequence[torch.dtype] = HALVES) -> Iterator[Match | Reject]:
    """Matches bind what stands `before` the dots, the vectors `z`, and the indices `i` and `j` of the pairs."""
    for cat in search.calls(aten.cat.default):
        value = tensor_of(cat)
        if value is None or not value.is_cuda or value.dtype not in dtypes or not search.inference:
            continue
        parts: Any = cat.args[0]
        if value.dim() != 2 or len(parts) != 2 or joined_dim(cat) != 1:
            continue
        before, pairs = parts
        found = _pairs(pairs)
        if found is not None and before.meta["val"].dim() == 2 and before.meta["val"].dtype == value.dtype:
            yield Match(cat, {"before": before, **found})


def _pairs(node: Node) -> dict[str, Node] | None:
    """The vectors and indices of a chosen part of a Gram matrix that nobody else reads."""
    if not is_ours(node, "fxopt::pair_select") or len(node.users) > 1:
        return None
    gram, i, j = node.args
    if not isinstance(gram, Node) or gram.target is not aten.bmm.default or len(gram.users) > 1:
        return None
    z, turned = gram.args
    swapped = isinstance(turned, Node) and turned.target is aten.transpose.int and turned.args[0] is z
    if not swapped or not isinstance(z, Node) or sorted(d % 3 for d in turned.args[1:]) != [1, 2]:  # type: ignore
        return None
    if any(static(size) is None for size in (*z.meta["val"].shape[1:], shape_of(node)[1])):
        return None
    return {"z": z, "i": i, "j": j}  # type: ignore[dict-item]


def find_gathered(search: Search) -> Iterator[Match | Reject]:
    """Such rows of vectors that one call of fxopt::columns writes for them alone.

    Matches bind `z`, the vectors, the `columns` that write them, and the arguments of the dots behind z (`rest`).
    """
    for node in calls_of_ours(search.graph, "fxopt::gpu_dots") if search.inference else ():
        z, *rest = node.args
        columns = _columns_of(z)
        if columns is not None:
            match = Match(node, {"z": z, "columns": columns, "rest": rest})
            yield search.unedited(match, columns.all_input_nodes, node)


def _columns_of(z: Any) -> Node | None:
    """The call that wrote these vectors and nothing else."""
    while isinstance(z, Node) and len(z.users) == 1 and z.target in _VIEWS:
        z = z.args[0]
    if not isinstance(z, Node) or z.target is not operator.getitem or len(z.users) > 1:
        return None
    call = z.args[0]
    alone = isinstance(call, Node) and is_ours(call, "fxopt::columns") and len(call.users) == 1
    return call if alone and len(call.meta["val"]) == 1 else None  # type: ignore[return-value,union-attr]
