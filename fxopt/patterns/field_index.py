"""Advanced indexing of fields and of field pairs by constants, as interactions write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.strides import Layout


def find_field_index(search: Search) -> Iterator[Match | Reject]:
    """x[:, i] of x [B, F, ...], and z[:, i, j] of z [B, F, G] (the triangle of a dot interaction), with constants that
    lie inside the dims they index; pairs also with tensors (triu_indices).

    follows: whether something could tell that the fields of a tensor lie in memory as the tensor does.
    """
    aliases, strides = search.aliases, search.strides
    for node in search.calls(torch.ops.aten.index.Tensor):
        source, (rows, *indices) = cast(Any, node.args)
        listed = rows is None and len(indices) in (1, 2) and None not in indices
        if not listed or "bound" in node.meta or any(map(aliases.edited, (source, *indices))):
            continue
        seen = strides.asked(node) is not Layout.ANY and strides.known(source) is not Layout.CONTIGUOUS
        sizes = [static(size) for size in shape_of(source)[1 : 1 + len(indices)]]
        if all(index.meta.get("literal") for index in indices):
            flat = _flat(indices, sizes)
            pairs = len(indices) == 2
            if isinstance(flat, Reject):
                yield flat
            else:
                yield Match(node, {"source": source, "flat": flat, "pairs": pairs, "follows": seen and not pairs})
        elif len(indices) == 2 and all(map(_is_list, indices)):
            yield Match(node, {"source": source, "live": tuple(indices)})
        else:
            yield Reject(
                "its index is not a constant list; index with a Python list or torch.tensor of one", indices[0]
            )


def _is_list(index: Node) -> bool:
    value = index.meta["val"]
    return value.dim() == 1 and value.dtype == torch.int64


def _flat(indices: list[Node], sizes: list[int | None]) -> Tensor | Reject:
    """The position of each index, or pair, in the flattened dims: int64 [K]."""
    flat: Tensor | None = None
    for index, size in zip(indices, sizes, strict=True):
        values = getattr(index.graph.owning_module, str(index.target))
        if not _is_list(index) or size is None or not bool(((values >= -size) & (values < size)).all()):
            return Reject("its indices may lie outside of the tensor", index)
        if flat is not None and flat.shape != values.shape:
            return Reject("its index lists have different lengths", index)
        flat = values % size if flat is None else flat * size + values % size
    assert flat is not None
    return flat
