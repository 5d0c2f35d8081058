"""Target attention on a GPU, without gradients: one launch, teams of warps take rows, nothing of size [B, T, 4 D].

A block folds all weights once into shared memory; positions that a mask fills are skipped. Sums are fp32 whatever the
dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from .. import reference
from ..plan import Plan
from .encoder import OPERANDS, Lists, encode, width_of

KERNEL = cuda_build.CudaLibrary(
    "fxopt_cuda_attention",
    source=Path(__file__).with_name("attention.cu"),
    functions=("fxopt_attention",),
)


class Attention:
    """The operator for one plan, which keeps what it encoded for the shapes that it saw last."""

    def __init__(self, words: Sequence[int]) -> None:
        self._plan = Plan.of(list(words))
        self._known: tuple[object, bytes | None] = (None, None)

    def __call__(
        self, rows: list[Tensor], positions: list[Tensor], masks: list[Tensor], params: list[Tensor], words: object
    ) -> Tensor:
        """As `fxopt::target_attention` on CUDA tensors; in PyTorch where the kernel cannot serve."""
        lists = (rows, positions, masks, params)
        fits = cuda_call.alike((*positions, *rows, *params)) and _alike_masks(masks, positions[0])
        encoded = self._encoded(lists) if fits else None
        kernel = cuda_build.loaded(KERNEL, positions[0].get_device()) if encoded is not None else None
        if encoded is None or kernel is None:
            return reference.target_attention(rows, positions, masks, params, self._plan)
        out = positions[0].new_empty(positions[0].shape[0], width_of(positions, self._plan))
        return cuda_call.filled(kernel.fxopt_attention, parameters(lists, out, self._plan, encoded), out)

    def _encoded(self, lists: Lists) -> bytes | None:
        if len({len(x) for tensors in lists[:3] for x in tensors}) != 1:
            return None
        rows, positions, masks, params = lists
        shapes = [x.shape[1:] for x in (*rows, *positions, *masks)], [x.shape for x in params], {x.dtype for x in masks}
        known = self._known  # another thread may replace it
        if known[0] != shapes:
            known = self._known = shapes, encode(lists, self._plan)
        return known[1]


def parameters(lists: Lists, out: Tensor, plan: Plan, encoded: bytes) -> bytes:
    """attention.cu's Attention."""
    rows, positions, masks, params = lists
    matrices = {plan.weight, *(weight for weight, _ in plan.layers)}
    params = [x if number in matrices else x.reshape(-1) for number, x in enumerate(params)]
    operands = cuda_call.operands((out, *rows, *positions, *masks, *params), OPERANDS)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"  # allow_tf32 raises where this was set
    return operands + struct.pack("<2i", len(out), exact) + encoded


def _alike_masks(masks: Sequence[Tensor], like: Tensor) -> bool:
    dtypes = {mask.dtype for mask in masks}
    return all(mask.device == like.device for mask in masks) and dtypes in (set(), {torch.bool}, {like.dtype})
