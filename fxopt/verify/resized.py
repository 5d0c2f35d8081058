"""Inputs of other batch sizes, made from those of a capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


def resized(graph: fx.Graph, inputs: Sequence[Tensor], size: int) -> list[Tensor] | None:
    """The inputs with `size` rows: those whose first dim is the most common one are cut, or their rows repeated.

    torch's embedding_bag trusts its offsets, and crashes where they are wrong, or where there are ids and no bags. So
    ids of jagged bags are never cut, and what offsets are made of is neither repeated nor emptied. Offsets that sizes
    alone make, of bags as long as each other, follow the ids where both have the rows.

    Args:
        graph: the captured graph; the last placeholders are the inputs.

    Returns:
        None where there are no such inputs.
    """
    batch = batch_of(inputs)
    changes = {k for k, t in enumerate(inputs) if t.dim() and t.shape[0] == batch}
    if batch == 0 or not all(bags.stay(changes, 1 <= size <= batch) for bags in _bags(graph, len(inputs))):
        return None
    rows = [torch.arange(size, device=t.device) % batch if k in changes else None for k, t in enumerate(inputs)]
    return [t if row is None else t.index_select(0, row) for t, row in zip(inputs, rows, strict=True)]


def batch_of(inputs: Sequence[Tensor]) -> int:
    """The most common first size; 0 where there is none."""
    first = Counter(t.shape[0] for t in inputs if t.dim())
    return first.most_common(1)[0][0] if first else 0


@dataclass(frozen=True)
class _Bags:
    """The inputs, by number, that the ids and the offsets of a call are computed from. jagged: by values, not sizes."""

    ids: set[int]
    offsets: set[int]
    jagged: bool

    def stay(self, changes: set[int], fewer: bool) -> bool:
        """Whether these are bags when some inputs get other rows; `fewer`, and not none: of their own."""
        if self.jagged:
            return not changes & self.ids and (fewer or not changes & self.offsets)
        read = self.ids | self.offsets
        return read <= changes or not changes & read


def _bags(graph: fx.Graph, count: int) -> Iterator[_Bags]:
    inputs = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder")[-count:])}
    for node in graph.nodes:
        if "embedding_bag" in str(node.target) and len(node.args) > 2:
            ids, offsets = (
                {inputs[each] for each in _ancestors(argument) if each in inputs} for argument in node.args[1:3]
            )
            jagged = any(each.op != "call_function" for each in _ancestors(node.args[2], sizes=False))
            yield _Bags(ids, offsets, jagged)


def _ancestors(value: object, sizes: bool = True) -> set[fx.Node]:
    """What a value is computed from, itself included; without `sizes` not what only tells its size."""
    left, seen = [value] if isinstance(value, fx.Node) else [], set[fx.Node]()
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += node.all_input_nodes if sizes or node.target not in _SIZES else ()
    return seen
