"""Fields, and pairs of fields, that a mask in a buffer selects: masked_select(gram, triu) and x[:, mask]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.interactions.constants import constant_tensor
from fxopt.shape.sizes import is_tensor, same, shape_of, static

aten = torch.ops.aten


@dataclass(frozen=True)
class Selected:
    """`node` keeps of dims first..last of `x` what `mask` says; masked_select makes one dim of the result."""

    x: Node
    mask: Node
    first: int
    last: int
    flat: bool

    @property
    def over(self) -> list[int]:
        """The sizes of these dims."""
        return [int(size) for size in shape_of(self.x)[self.first : self.last + 1]]

    @property
    def own(self) -> list[int]:
        """Those of the mask, where it has them: 1 where all of a dim is taken or left."""
        sizes = (1,) * len(shape_of(self.x)) + tuple(shape_of(self.mask))
        behind = len(shape_of(self.x)) - 1 - self.last if self.flat else 0
        end = len(sizes) - behind
        return [int(size) for size in sizes[end - len(self.over) : end]]


def find_masked_fields(search: Search) -> Iterator[Match | Reject]:
    """Those whose mask depends on buffers and constants alone: how much it selects is known, and asked at each call."""
    held = {node: tensor for node in search.graph.find_nodes(op="placeholder") if (tensor := _held(node)) is not None}
    for node in search.graph.nodes:
        selected = _READERS[node.target](node) if node.target in _READERS else None
        if selected is None or selected.mask.meta["val"].dtype != torch.bool:
            continue
        content = constant_tensor(selected.mask, held)
        if content is None:
            continue
        count, reads = int(content.reshape(selected.own).broadcast_to(selected.over).sum()), (selected.x, selected.mask)
        match = Match(node, {"selected": selected, "reads": reads, "count": count})
        yield search.unedited(match, reads, node, "its mask, or what it selects from, is edited in place")


def _held(node: Node) -> Tensor | None:
    return node.meta["tensor"]() if "state" in node.meta and "tensor" in node.meta else None


def _masked_select(node: Node) -> Selected | None:
    x, mask = node.args
    if not isinstance(x, Node) or not isinstance(mask, Node):
        return None
    sizes, offset = shape_of(mask), len(shape_of(x)) - len(shape_of(mask))
    dims = [offset + dim for dim, size in enumerate(sizes) if static(size) != 1]
    if not dims or offset < 0:
        return None
    fixed = shape_of(x)[dims[0] : dims[-1] + 1]
    fit = all(same(shape_of(x)[dim], sizes[dim - offset]) for dim in dims)
    return Selected(x, mask, dims[0], dims[-1], True) if fit and None not in map(static, fixed) else None


def _index(node: Node) -> Selected | None:
    x, indices = node.args[:2]
    if not isinstance(x, Node) or not isinstance(indices, list | tuple) or len(indices) == 0:
        return None
    *before, mask = indices
    if any(index is not None for index in before) or not is_tensor(mask):
        return None
    first, sizes = len(before), shape_of(mask)
    last = first + len(sizes) - 1
    fit = len(sizes) > 0 and all(map(same, shape_of(x)[first : last + 1], sizes)) and None not in map(static, sizes)
    return Selected(x, mask, first, last, False) if fit else None


_READERS = {aten.masked_select.default: _masked_select, aten.index.Tensor: _index}
