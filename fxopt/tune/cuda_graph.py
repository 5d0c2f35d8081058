"""Captures of CUDA graphs that leave nothing behind when they fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fxopt.locks import lock
from fxopt.torch_internals.cuda import forget_pool

_one_at_a_time = lock()  # two captures of one process disturb each other in torch's allocator
_failed: list[torch.cuda.CUDAGraph] = []  # torch goes on pointing to them


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """torch.cuda.graph for what this thread does. Where the capture ends in an error (something waited for the device),
    the current stream and the allocator are as they were.

    torch 2.11 to 2.13 put back neither: the capture's stream stays the current one, and an allocator that believes in a
    capture may assert when its cache is emptied, as every capture begins by doing.
    """
    current, pool = torch.cuda.current_stream(), pool or torch.cuda.graph_pool_handle()
    try:
        with _one_at_a_time, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        torch.cuda.set_stream(current)
        with contextlib.suppress(RuntimeError):  # of an allocator that was told
            forget_pool(current.device_index, pool)
            _failed.append(graph)
        raise
