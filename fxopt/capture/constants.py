"""Small tensors of bools and integers that a module holds as attributes, and what is computed from them alone.

A mask that picks columns, as in `x[:, self.is_number]`, decides how many there are. Its numbers are taken for granted
like those of Python attributes, and each call asks whether they still are what they were.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt import trees
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.torch_internals.modes import no_dispatch_modes, no_function_modes
from fxopt.torch_internals.symbols import static

_MOST = 1000  # elements: a call compares them in 1 us


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a call can see at little cost if its numbers have changed, by whatever way."""
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    return trees.is_dense(tensor) and tensor.is_cpu and exact and tensor.numel() <= _MOST and not tensor.is_inference()


class Constants:
    """What is known of the nodes of a trace."""

    def __init__(self, tracer: Any, aliases: Aliases) -> None:
        self._tracer = tracer
        self._aliases = aliases
        self._known: dict[Node, Any] = {}

    def of_own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Of a tensor that the trace has not made; its numbers are read."""
        if not is_small(tensor) or not self._aliases.is_kept(self._tracer.memory.of(tensor)):
            return None
        self._tracer.reads(tensor)
        return tensor

    def of(self, node: Node) -> Any:
        """What a node gives, or a list of it; None where that is not known."""
        if node not in self._known:
            self._known[node] = self._find(node)
        return None if self._aliases.edited(node) or self._aliases.leaves(node) else self._known[node]

    def _find(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self.of_own(getattr(self._tracer.root, str(node.target)))
        if not _is_computed(node) or not node.all_input_nodes:
            return None
        if any(self.of(argument) is None for argument in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), self.of)
        with torch.inference_mode(False), torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_computed(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    made = trees.leaves(node.meta.get("val"))
    small = all(isinstance(t, torch.Tensor) and all(static(size) is not None for size in t.shape) for t in made)
    return small and is_pure(node) and sum(t.numel() for t in made) <= _MOST


def places_of(indices: Sequence[Any], tensor: torch.Tensor, proofs: Any) -> list[Any]:
    """The indices of `tensor[...]`, with those of the ones in place of each mask that is known."""
    found: list[Any] = []
    dim = 0
    for index in indices:
        mask = index if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() else None
        sizes = tensor.shape[dim : dim + (1 if mask is None else mask.dim())]
        dim += len(sizes)
        fits = mask is not None and tuple(map(static, sizes)) == tuple(mask.shape)
        known = proofs.constant(mask) if fits else None
        found += [index] if known is None else _places(known, tensor.device)
    return found


def _places(mask: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where it holds, for each of its dims."""
    with no_function_modes(), no_dispatch_modes(), torch.inference_mode(False):
        return tuple(mask.nonzero().to(device).T.contiguous().unbind())
