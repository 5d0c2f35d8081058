"""Who runs a case of the GPU benchmark: eager, fxopt, torch.compile and fbgemm_gpu."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxopt
from bench.gpu_cases import Bags, Case


class Unavailable(Exception):
    """Why somebody does not run a case."""


@dataclass(frozen=True)
class Peer:
    """make(case) gives a call of it. replays: calls are replays of a graph already, and are not captured again.
    seconds(case): that making it takes, None: few."""

    name: str
    make: Callable[[Case], Callable[[], Any]]
    replays: bool = False
    seconds: Callable[[Case], float] | None = None
    runs: Callable[[Case], bool] = lambda case: True


def peers() -> tuple[Peer, ...]:
    return (
        Peer("eager", lambda case: lambda: case.module(*case.inputs)),
        Peer("fxopt", _with_fxopt(fxopt.Config(cuda_graphs=False))),
        Peer("fxopt cuda_graphs", _with_fxopt(fxopt.Config(cuda_graphs=True)), replays=True),
        Peer("FBGEMM TBE", _with_fbgemm, runs=lambda case: isinstance(case.module, Bags)),
        Peer("compile", _with_compile(None), seconds=lambda case: case.compile_seconds[0]),
        Peer("compile max-autotune", _with_compile("max-autotune"), True, lambda case: case.compile_seconds[1]),
    )


def _with_fxopt(config: fxopt.Config) -> Callable[[Case], Callable[[], Any]]:
    """Optimizes a module once for all its batch sizes."""
    known: dict[nn.Module, nn.Module] = {}

    def make(case: Case) -> Callable[[], Any]:
        if case.module not in known:
            known[case.module] = fxopt.optimize(case.module, case.inputs, config)
        optimized = known[case.module]
        return lambda: optimized(*case.inputs)

    return make


def _with_compile(mode: str | None) -> Callable[[Case], Callable[[], Any]]:
    def make(case: Case) -> Callable[[], Any]:
        torch._dynamo.reset()
        torch._inductor.config.autotune_num_choices_displayed = 0  # its tables would hide this one
        compiled = torch.compile(case.module, mode=mode)
        return lambda: compiled(*case.inputs)

    return make


def _with_fbgemm(case: Case) -> Callable[[], Tensor]:
    assert isinstance(case.module, Bags)
    try:
        return with_fbgemm(case.module, *case.inputs)
    except ImportError as error:
        raise Unavailable(f"fbgemm_gpu cannot be imported ({error})") from error


def with_fbgemm(bags: Bags, ids: list[Tensor], offsets: list[Tensor]) -> Callable[[], Tensor]:
    """The same by fbgemm_gpu's table-batched operator, its inputs already in the layout it wants.

    bfloat16 tables are float16 there, as many bytes: it has no bfloat16 rows on CUDA.

    Raises:
        ImportError: fbgemm_gpu is not installed.
    """
    logging.disable(logging.WARNING)  # ten times that it cannot tell whether it fits this torch
    import fbgemm_gpu  # noqa: F401

    logging.disable(logging.NOTSET)
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    weights: list[Any] = [bag.weight for bag in bags.bags]
    on_gpu = weights[0].is_cuda
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    device = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    precision = SparseType.FP32 if weights[0].dtype == torch.float32 else SparseType.FP16
    specs = [(*w.shape, place, device) for w in weights]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(specs, weights_precision=precision, output_dtype=precision)
    for mine, theirs in zip(weights, tbe.split_embedding_weights(), strict=True):
        theirs.copy_(mine)
    starts = itertools.accumulate([0, *(len(i) for i in ids[:-1])])
    ends = [o[:-1] + s for o, s in zip(offsets, starts, strict=True)]
    indices, places = torch.cat(ids), torch.cat([*ends, torch.tensor([sum(map(len, ids))], device=ids[0].device)])
    return functools.partial(tbe, indices, places)
