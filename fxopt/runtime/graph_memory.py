"""How much of a device's memory captured graphs may hold: all of a process together, an eighth of what is free."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fxopt.torch_internals.cuda import bytes_of_pool

SHARE = 8
_everywhere: weakref.WeakSet[GraphMemory] = weakref.WeakSet()


class GraphMemory:
    """What the graphs of one executable hold: a pool that they share, and the copies of their inputs.

    Attributes:
        held: bytes, as last counted.
        pool: the handle; None: the next capture begins a new one.
    """

    def __init__(self, device: torch.device) -> None:
        self.held = 0
        self.pool: Any = None
        self._device = device
        _everywhere.add(self)

    def begun(self) -> Any:
        """The pool to capture into."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        return self.pool

    def count(self, staged: Iterable[int]) -> None:
        """What is held now. staged: bytes of each graph's inputs; none: the pool went with the last graph."""
        sizes = list(staged)
        self.pool = self.pool if sizes else None
        self.held = sum(sizes) + (bytes_of_pool(self.pool) if self.pool else 0)

    def excess(self, more: int = 0) -> str:
        """Why these graphs, and `more` bytes, are too much; "" where they are not."""
        others = sum(other.held for other in set(_everywhere) if other._device == self._device and other is not self)
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        allowed = (free + max(0, unused - self.held) + others + self.held) // SHARE
        if others + self.held + more <= allowed:
            return ""
        return (
            f"graphs would hold {(others + self.held + more) >> 20:,} MB, and they may hold {allowed >> 20:,} MB, "
            "an eighth of the memory that the device has free"
        )
