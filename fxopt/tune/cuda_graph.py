"""Captures of CUDA graphs that leave nothing behind when they fail, and whose matrix products go on having memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fxopt.locks import lock
from fxopt.torch_internals.cuda import forget_pool

_one_at_a_time = lock()  # two captures of one process disturb each other in torch's allocator
_failed: list[torch.cuda.CUDAGraph] = []  # torch goes on pointing to them
_workspaces: dict[torch.cuda.Stream, torch.cuda.MemPool] = {}


def keep_workspace(stream: torch.cuda.Stream) -> None:
    """What cuBLAS works in, on this stream and in this thread, lies in memory that stays mapped and is nobody else's.

    A graph knows its address, and PyTorch frees all of it where torch.compile(mode="reduce-overhead") records a graph
    (clear_cublas_manager in torch/_inductor/cudagraph_trees.py). Freed, it lies in a pool of this stream's own.
    """
    with torch.cuda.stream(stream):  # and on its device
        if stream not in _workspaces:
            _workspaces[stream] = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(_workspaces[stream]):
            square = torch.zeros(16, 16, device=stream.device)
            torch.addmm(square[0], square, square)  # cuBLASLt's, which may be another than cuBLAS's
            torch.cuda.current_blas_handle()


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """torch.cuda.graph for what this thread does. Where the capture ends in an error (something waited for the device),
    the current stream, the allocator and the generator of random numbers are as they were.

    torch 2.11 to 2.13 put back none: the capture's stream stays the current one, an allocator that believes in a
    capture may assert when its cache is emptied, as every capture begins by doing, and a generator that does raises at
    each call that draws.
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
        with contextlib.suppress(RuntimeError), _one_at_a_time:
            _capture_well(stream)
        raise


def _capture_well(stream: torch.cuda.Stream) -> None:
    """Begin and end a capture of one operator, after which the generator knows that none is going on."""
    graph, number = torch.cuda.CUDAGraph(), torch.zeros((), device=stream.device)
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        graph.capture_end()
