"""A second stream for part of a graph, while a CUDA graph is being captured; else everything stays on one.

A branch stands between :func:`fork` and :func:`leave`; :func:`join` stands before the first reader of its results. In a
replay the branch and what stands between `leave` and `join` run beside each other.

Memory, of which the allocator keeps free blocks by stream and gives them out in that stream's order:

- What the main stream made and the branch reads is an argument of `join`, so it lives until the main stream waits.
- What the branch made is free again for branches alone. The next one begins by waiting for all that the main stream was
  given until then, and by that time it has been given the last reader of whatever is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxopt.torch_internals.cuda import torch_cuda

_NON_BLOCKING, _RELAXED = 1, 2
_FUNCTIONS = ("cudaStreamCreateWithFlags", "cudaThreadExchangeStreamCaptureMode")


@dataclass
class Fork:
    """A branch under way. `done`: what it was given, None before its end; `joined`: the main stream waits for that."""

    main: torch.cuda.Stream
    side: torch.cuda.Stream
    done: torch.cuda.Event | None = None
    joined: bool = False


def fork() -> Fork | None:
    """What follows is launched on a stream beside the current one. None: nobody captures, and nothing changes."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    main = torch.cuda.current_stream()
    side = beside(main)
    if side is None:
        return None
    torch.cuda.set_stream(side)
    return Fork(main, side)


def leave(fork: Fork | None) -> None:
    """The end of the branch."""
    if fork is None:
        return
    torch.cuda.set_stream(fork.main)
    fork.done = fork.side.record_event()


def join(fork: Fork | None, *read: object) -> None:
    """What follows may read the results of the branch. `read`: what it read, alive until here."""
    if fork is None:
        return
    assert fork.done is not None
    fork.main.wait_event(fork.done)
    fork.joined = True


def join_all(values: Iterable[object]) -> None:
    """After an error, whose caller may go on capturing: ends and joins each fork among `values`, the innermost last."""
    for each in values:
        if isinstance(each, Fork) and not each.joined:
            with contextlib.suppress(RuntimeError):  # the error may have ended the capture
                if each.done is None:
                    leave(each)
                join(each)


_SIDES: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # by the stream that captures


def beside(main: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """A stream that takes part in the capture of `main`, from what it was given until now. None: there is none.

    It is one of our own: one of torch's might be anybody's, whose work would become part of the graph. And it is for
    `main` alone: cuBLAS has a workspace a stream, and graphs that were captured on two streams may run at once.
    """
    side = _SIDES.get(main) or new_stream(main.device_index)
    if side is None:
        return None
    side = _SIDES.setdefault(main, side)
    side.wait_stream(main)
    return side


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """CUDA's runtime, as torch's library links to it; None where it holds none that can be called."""
    try:
        library = torch_cuda()
    except OSError:
        return None
    return library if all(hasattr(library, name) for name in _FUNCTIONS) else None


def new_stream(device: int) -> torch.cuda.Stream | None:
    """One that nobody else has, on the current device. In a capture, whose mode may forbid it; None: there is none."""
    runtime = _runtime()
    if runtime is None:
        return None
    mode, handle = ctypes.c_int(_RELAXED), ctypes.c_void_p()
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    failed = runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING)
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return None if failed or handle.value is None else torch.cuda.ExternalStream(handle.value, device=device)
