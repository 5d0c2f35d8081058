"""Products, and dots, of the fields that two lists of indices take from one tensor, on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.interactions.serves import multiplies
from fxopt.patterns.core import Match, Reject, Search, is_ours
from fxopt.patterns.lookup_products import sums_vectors
from fxopt.shape.sizes import is_float32, same_shape, shape_of, static

aten = torch.ops.aten


def find_pair_products(search: Search) -> Iterator[Match | Reject]:
    """z[:, i] * z[:, j] of z [B, F, D], and its sum over D: alone where nobody else reads the product, else beside it.

    Matches bind `z`, the indices `i` and `j`, and whether the anchor is that sum (`dots`).
    """
    for product in search.calls(aten.mul.Tensor) if search.inference else ():
        if (found := _pairs(product)) is not None:
            (reader, *others) = product.users
            dots = not others and sums_vectors(reader)
            yield _judged(search, reader if dots else product, dots, found)
    for total in search.calls(aten.sum.dim_IntList) if search.inference else ():
        product = total.args[0]  # type: ignore[assignment]
        if is_ours(product, "fxopt::gpu_pairs") and sums_vectors(total) and not product.args[3]:
            z, i, j, _ = product.args
            yield _judged(search, total, True, {"z": z, "i": i, "j": j, "product": product})  # type: ignore[dict-item]


def _judged(search: Search, anchor: Node, dots: bool, reads: dict[str, Node]) -> Match | Reject:
    return search.unedited(Match(anchor, {**reads, "dots": dots}), reads.values(), anchor)


def _pairs(product: Node) -> dict[str, Node] | None:
    """The fields and the indices of a product that the kernel serves."""
    if not is_float32(product, "cuda", rank=3) or not product.users:
        return None
    left, right = (_taken(operand) for operand in product.args)
    if left is None or right is None or left[0] is not right[0] or not same_shape(left[1], right[1]):
        return None
    z, i = left
    fields, dim = (static(size) for size in shape_of(z)[1:])
    fits = fields is not None and dim is not None and multiplies(fields, dim)
    return {"z": z, "i": i, "j": right[1]} if fits else None


def _taken(node: Any) -> tuple[Node, Node] | None:
    """z and i of a z[:, i] that one operator reads."""
    if not isinstance(node, Node) or len(node.users) > 1:
        return None
    arguments: Any = node.args
    if node.target is aten.index_select.default:
        z, dim, i = arguments
    elif node.target is aten.index.Tensor and len(arguments[1]) == 2 and arguments[1][0] is None:
        (z, (_, i)), dim = arguments, 1
    else:
        return None
    index, source = i.meta["val"], z.meta["val"]
    listed = index.dim() == 1 and index.dtype == torch.int64 and index.device == source.device
    return (z, i) if listed and is_float32(z, rank=3) and dim % 3 == 1 else None
