"""Whether lookups stay within their tables: on a GPU, one that does not is an assertion that ends the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_ROWS = (aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx)
_ALONG = (aten.index_select.default, aten.gather.default)
_BY_INDEX = ("index", "gather", "take", "scatter", "embedding", "one_hot")

Index = tuple[fx.Node, int, fx.Node]  # the source, the axis, and the integers


def is_lookup(node: fx.Node) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in _BY_INDEX)


def indices_of(node: fx.Node) -> list[Index] | None:
    """What a lookup reads where; None for one that is not understood."""
    if node.target in _ROWS:
        return [(node.args[0], 0, node.args[1])]  # type: ignore[list-item]
    if node.target in _ALONG:
        source, axis, index = node.args[:3]
        return [(source, axis, index)]  # type: ignore[list-item]
    if node.target is aten.index.Tensor:
        source, indices = node.args[:2]
        found = [(source, axis, index) for axis, index in enumerate(indices) if index is not None]  # type: ignore
        integers = [index.meta["val"].dtype is not torch.bool for _, _, index in found]
        return found if all(integers) else None  # type: ignore[return-value]
    return None


def is_in_range(index: Index, known: Mapping[fx.Node, Any], from_end: bool) -> bool:
    """Whether known integers are in the rows of their source. from_end: they may count from behind."""
    source, axis, integers = index
    value = known.get(source, source.meta.get("val"))
    size = value.shape[axis] if isinstance(value, Tensor) else None
    if type(size) is not int:
        return False
    values = known[integers]
    return not values.numel() or (int(values.min()) >= (-size if from_end else 0) and int(values.max()) < size)
