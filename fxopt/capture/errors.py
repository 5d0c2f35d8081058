"""Why a model, or a part of it, cannot become a graph."""

from __future__ import annotations

import torch

from fxopt.findings import Place

_UNKNOWN = Place()


class CaptureError(RuntimeError):
    """The model stays eager. `reason` is for the user; `place` names the module and source line that stopped it."""

    def __init__(self, reason: str, place: Place = _UNKNOWN):
        super().__init__(f"{place}: {reason}")
        self.reason = reason
        self.place = place


class OtherData(CaptureError):
    """The graph gives up on the data of the call that it was made from; it may serve another call."""


class Busy(CaptureError):
    """Another thread's capture did not end, perhaps because it waits for this thread."""


def is_passing(error: BaseException | None) -> bool:
    """Whether memory was short, or another thread in the way, which says nothing about the model."""
    while error is not None:
        allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
        if allocator or isinstance(error, (Busy, MemoryError, torch.OutOfMemoryError)):
            return True
        error = error.__cause__
    return False
