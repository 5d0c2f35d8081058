"""Inputs of other batch sizes, made from those of a capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx


def resized(graph: fx.Graph, inputs: Sequence[Tensor], size: int) -> list[Tensor] | None:
    """The inputs with `size` rows: those whose first dim is the most common one are cut, or their rows repeated.

    torch's embedding_bag trusts its offsets, and crashes where they are wrong, or where there are ids and no bags. So
    ids of bags are never cut, and what offsets are made of is neither repeated nor emptied.

    Args:
        graph: the captured graph; the last placeholders are the inputs.

    Returns:
        None where there are no such inputs.
    """
    batch = batch_of(inputs)
    changes = {k for k, t in enumerate(inputs) if t.dim() and t.shape[0] == batch}
    ids, offsets = _of_bags(graph, len(inputs))
    if batch == 0 or changes & ids or (changes & offsets and not 1 <= size <= batch):
        return None
    rows = [torch.arange(size, device=t.device) % batch if k in changes else None for k, t in enumerate(inputs)]
    return [t if row is None else t.index_select(0, row) for t, row in zip(inputs, rows, strict=True)]


def batch_of(inputs: Sequence[Tensor]) -> int:
    """The most common first size; 0 where there is none."""
    first = Counter(t.shape[0] for t in inputs if t.dim())
    return first.most_common(1)[0][0] if first else 0


def _of_bags(graph: fx.Graph, count: int) -> tuple[set[int], set[int]]:
    """By number: inputs that ids of jagged bags are computed from, and those that their offsets are."""
    inputs = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder")[-count:])}
    ids, offsets = set[int](), set[int]()
    for node in graph.nodes:
        if "embedding_bag" in str(node.target) and len(node.args) > 2:
            ids |= _reached([node.args[1]], inputs)
            offsets |= _reached([node.args[2]], inputs)
    return ids, offsets


def _reached(values: Iterable[object], inputs: dict[fx.Node, int]) -> set[int]:
    """The inputs among the ancestors of values."""
    left, seen = [value for value in values if isinstance(value, fx.Node)], set[fx.Node]()
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return {inputs[node] for node in seen if node in inputs}
