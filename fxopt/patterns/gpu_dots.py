"""cat([before, z z^T [:, i, j]], 1) of vectors on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.interactions.serves import STEPS
from fxopt.patterns.core import Match, Reject, is_ours
from fxopt.shape.sizes import shape_of, static, tensor_of

aten = torch.ops.aten


def find_gpu_dots(module: GraphModule, inference: bool, size: int = 2) -> Iterator[Match | Reject]:
    """`size`: bytes of a number."""
    for cat in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        value = tensor_of(cat)
        if value is None or not value.is_cuda or value.dtype not in STEPS or not inference or value.itemsize != size:
            continue
        parts: Any = cat.args[0]
        if value.dim() != 2 or len(parts) != 2 or (cat.args[1:] or (0,))[0] not in (1, -1):
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
