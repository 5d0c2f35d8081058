"""Inputs of other batch sizes, made from those of a capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxopt.shape.calls import ancestors
from fxopt.shape.lookups import is_lookup
from fxopt.verify.reads import Reads, bags, is_of_others
from fxopt.verify.segments import are_sound


def resized(
    traced: fx.GraphModule, state: Sequence[Tensor], inputs: Sequence[Tensor], size: int
) -> list[Tensor] | None:
    """The inputs with `size` rows: those whose first dim is the most common one are cut, or their rows repeated.

    What trusts its integers crashes where they are wrong: torch's embedding_bag its offsets, also where there are ids
    and no bags; operators of others theirs; on CUDA, whatever looks up rows by index ends the process.

    Args:
        traced: the captured graph, ``forward(*state, *inputs)``.

    Returns:
        None where there are no such inputs, or a call might crash on them.
    """
    batch = batch_of(inputs)
    changes = {k for k, t in enumerate(inputs) if t.dim() and t.shape[0] == batch}
    calls = _Calls(traced.graph, inputs, changes)
    if batch == 0 or not all(calls.hold(node, size, batch) for node in traced.graph.nodes):
        return None
    rows = [torch.arange(size, device=t.device) % batch if k in changes else None for k, t in enumerate(inputs)]
    made = [t if row is None else t.index_select(0, row) for t, row in zip(inputs, rows, strict=True)]
    return made if not bags(traced.graph) or are_sound(traced, state, made) else None


def batch_of(inputs: Sequence[Tensor]) -> int:
    """The most common first size; 0 where there is none."""
    first = Counter(t.shape[0] for t in inputs if t.dim())
    return first.most_common(1)[0][0] if first else 0


class _Calls:
    """Which calls stay what they are when the inputs numbered `changes` get other rows."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Tensor], changes: set[int]) -> None:
        self.behind = Reads(graph, len(inputs)).behind
        self.changes = changes
        self.integers = {k for k, t in enumerate(inputs) if not t.is_floating_point()}
        self.on_cuda = any(t.is_cuda for t in inputs)

    def hold(self, node: fx.Node, size: int, batch: int) -> bool:
        if node.op not in ("call_function", "call_module"):
            return True
        name = str(node.target)
        if node.op == "call_function" and "embedding_bag" in name and len(node.args) > 2:
            return self._are_bags(node.args[1], node.args[2], 1 <= size <= batch)
        if is_of_others(node):
            read = self.behind(node.all_input_nodes)
            return not read & self.integers or not read & self.changes
        if self.on_cuda and size < batch and is_lookup(node):
            source, *index = node.all_input_nodes
            cut = self.behind([source]) & self.changes
            return not cut or not self.behind(index, sizes=False) & self.integers
        return True

    def _are_bags(self, ids: object, offsets: object, fewer: bool) -> bool:
        """Ids of jagged bags are never cut, and what their offsets are made of is neither repeated nor emptied. Where
        sizes alone make the offsets, both have other rows, or none has.
        """
        jagged = any(each.op != "call_function" for each in ancestors([offsets], sizes=False))
        of_ids, of_offsets = self.behind([ids]), self.behind([offsets])
        if jagged:
            return not self.changes & of_ids and (fewer or not self.changes & of_offsets)
        return of_ids | of_offsets <= self.changes or not self.changes & (of_ids | of_offsets)
