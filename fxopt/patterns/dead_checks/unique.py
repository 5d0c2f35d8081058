"""Lookups of the distinct ids only, put back by their inverse: the rows of all ids, with a sort and a sync before."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.patterns.dead_checks.proofs import Checks
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import same_shape, shape_of

aten = torch.ops.aten
_UNIQUES = {
    aten._unique2.default,
    aten._unique.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.unique_dim_consecutive.default,
}


def find_deduplicated(checks: Checks, node: Node) -> dict[str, Node] | None:
    """node = embedding(table, unique(ids))[inverse]: the `ids`, and the `lookup`, an embedding or index_select."""
    rows, inverse = _gathered(node)
    if rows is None or inverse is None or rows.target not in (aten.embedding.default, aten.index_select.default):
        return None
    arguments = arguments_of(rows)
    is_embedding = rows.target is aten.embedding.default
    distinct = arguments["indices" if is_embedding else "index"]
    if is_embedding and not checks.inference and (arguments["sparse"] or arguments["scale_grad_by_freq"]):
        return None  # another gradient: of duplicates, or scaled by how many there are
    if not is_embedding and (arguments["dim"] != 0 or len(shape_of(inverse)) != 1):
        return None
    unique = _piece_of(distinct, 0)
    if unique is None or unique is not _piece_of(inverse, 1):
        return None
    ids = unique.args[0]
    assert isinstance(ids, Node)
    by_dim = "dim" in arguments_of(unique) and arguments_of(unique)["dim"] is not None
    if (by_dim and len(shape_of(ids)) != 1) or not same_shape(ids, inverse):
        return None
    if any(checks.aliases.edited(one) for one in (node, rows, distinct, inverse, ids)):  # type: ignore[arg-type]
        return None
    table = arguments["weight" if is_embedding else "self"]
    return None if checks.aliases.edited(table) else {"lookup": rows, "ids": ids}  # type: ignore[arg-type]


def _gathered(node: Node) -> tuple[Node | None, Node | None]:
    """(rows, inverse) of rows[inverse], in its three spellings."""
    if node.target is aten.index.Tensor:
        indices = node.args[1]
        assert isinstance(indices, list | tuple)
        rows, inverse = node.args[0], indices[0] if len(indices) == 1 else None
    elif node.target is aten.index_select.default and node.args[1] == 0:
        rows, inverse = node.args[0], node.args[2]
    elif (
        node.target is aten.embedding.default and len(node.args) == 2 and not node.kwargs
    ):  # no padding, a dense gradient
        rows, inverse = node.args
    else:
        return None, None
    return (rows if isinstance(rows, Node) else None), (inverse if isinstance(inverse, Node) else None)


def _piece_of(value: object, index: int) -> Node | None:
    """The unique whose output number `index` a value is."""
    if not isinstance(value, Node) or value.target is not operator.getitem or value.args[1] != index:
        return None
    unique = value.args[0]
    return unique if isinstance(unique, Node) and unique.target in _UNIQUES else None
