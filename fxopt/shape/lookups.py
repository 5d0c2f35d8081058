"""Whether lookups stay within their tables: on a GPU, one that does not is an assertion that ends the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ROWS = frozenset(
    {
        aten.embedding, aten.embedding_renorm_, aten.embedding_bag, aten._embedding_bag,
        aten._embedding_bag_forward_only,
    }
)  # fmt: skip
_ALONG = frozenset(
    {
        aten.index_select, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_,
        aten.scatter_reduce, aten.scatter_reduce_, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_,
        aten.index_fill, aten.index_fill_,
    }
)  # fmt: skip
_AT = frozenset({aten.index, aten.index_put, aten.index_put_})  # whose integers may count from the end
_BY_INDEX = ("index", "gather", "take", "scatter", "embedding", "one_hot")

Index = tuple[Any, int, Any]  # the source, the axis, and the integers: nodes of a graph, or tensors


def is_lookup(node: fx.Node) -> bool:
    return node.op == "call_function" and _looks_up(node.target)


def indices_of(node: fx.Node) -> list[Index] | None:
    """What a lookup reads where; None for one that is not understood."""
    return _read_by(node.target, node.args)


def is_in_range(node: fx.Node, index: Index, known: Mapping[fx.Node, Any]) -> bool:
    """Whether the integers, which are known, are in the rows of their source."""
    source, axis, integers = index
    return _are_in_range(node.target, known.get(source, source.meta.get("val")), axis, known[integers])


class CheckedLookups(TorchDispatchMode):
    """Within it, a lookup of torch's raises before it runs where its integers are not known to be in range.

    Raises:
        IndexError: which operator, along which axis.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and _looks_up(func):
            indices = _read_by(func, args)
            if indices is None and any(map(_holds_integers, pytree.tree_leaves(args))):
                raise IndexError(f"nobody knows which integers {func} may read by")
            for source, axis, integers in indices or ():
                if not _are_in_range(func, source, axis, integers):
                    raise IndexError(f"an integer of {func} is out of range along axis {axis}")
        return func(*args, **(kwargs or {}))


def _holds_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _looks_up(target: Any) -> bool:
    return any(word in str(target) for word in _BY_INDEX)


def _read_by(target: Any, args: Sequence[Any]) -> list[Index] | None:
    packet = getattr(target, "overloadpacket", None)
    if packet in _ROWS:
        return [(args[0], 0, args[1])]
    if packet in _ALONG:
        source, axis, index = args[:3]
        return [(source, axis, index)]
    if packet in _AT:
        source, indices = args[:2]
        found = [(source, axis, index) for axis, index in enumerate(indices) if index is not None]
        kinds = [(index.meta["val"] if isinstance(index, fx.Node) else index).dtype for _, _, index in found]
        return found if torch.bool not in kinds and torch.uint8 not in kinds else None
    return None


def _are_in_range(target: Any, source: Any, axis: int, integers: Any) -> bool:
    if not isinstance(source, Tensor) or type(size := source.shape[axis] if source.ndim else 1) is not int:
        return False
    least = -size if target.overloadpacket in _AT else 0
    return not integers.numel() or (int(integers.min()) >= least and int(integers.max()) < size)
