"""Why a model, or a part of it, cannot become a graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from fxopt.findings import Place

_UNKNOWN = Place()
_local = threading.local()


@contextlib.contextmanager
def noticing() -> Iterator[list[Exception]]:
    """The errors that this thread raises meanwhile for code of the user's, which may catch them: `except Exception`."""
    before = getattr(_local, "noticed", None)
    noticed: list[Exception] = []
    _local.noticed = noticed
    try:
        yield noticed
    finally:
        _local.noticed = before


def notice(error: Exception) -> None:
    if (noticed := getattr(_local, "noticed", None)) is not None:
        noticed.append(error)


class CaptureError(RuntimeError):
    """The model stays eager. `reason` is for the user; `place` names the module and source line that stopped it."""

    def __init__(self, reason: str, place: Place = _UNKNOWN):
        super().__init__(f"{place}: {reason}")
        self.reason = reason
        self.place = place
        notice(self)


class OtherData(CaptureError):
    """The graph gives up on the data of the call that it was made from; it may serve another call."""


class Busy(CaptureError):
    """Another thread's capture did not end, perhaps because it waits for this thread."""


class StartAgain(Exception):
    """The trace starts again, with something known of these dims of the inputs."""

    def __init__(self, dims: set[tuple[int, int]]):
        super().__init__(f"{type(self).__name__} {sorted(dims)}")
        self.dims = dims
        notice(self)


def is_passing(error: BaseException | None) -> bool:
    """Whether memory was short, or another thread in the way, which says nothing about the model."""
    while error is not None:
        allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
        if allocator or isinstance(error, (Busy, MemoryError, torch.OutOfMemoryError)):
            return True
        error = error.__cause__
    return False
