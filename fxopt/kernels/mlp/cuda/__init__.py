"""Chains of narrow layers on a GPU, without gradients: one launch, 32 rows a block through all layers.

Sums are fp32 whatever the dtype, on the CUDA cores; whether that beats a cuBLAS call for each layer depends on rows,
widths and TF32, so a trial on the device decides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from .. import reference
from ..plan import MOST_ON_CUDA, TENSORS, Op, Step, decode

_HERE = Path(__file__).parent
KERNEL = cuda_build.CudaLibrary(
    "fxopt_cuda_mlp", source=_HERE / "mlp.cu", headers=(cuda_call.FLOATS, _HERE.parents[1] / "gemm/tile.cuh"),
    functions=("fxopt_mlp",),
)  # fmt: skip
MOST_STEPS, MOST_OPERANDS = 24, 48  # mlp.cu's
_STEP = f"<3i{TENSORS}i2f"
Shapes = tuple[torch.Size, ...]


class Chain:
    """The operator for one plan, which keeps what it encoded for the shapes that it saw last."""

    def __init__(self, plan: Sequence[int]) -> None:
        self._steps = decode(plan)
        self._known: tuple[Shapes, bytes | None] = ((), None)

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor], plan: Sequence[int]) -> Tensor:
        """As `fxopt::mlp` for one input [M, K] on CUDA; layer by layer where the kernel cannot serve."""
        (x,) = inputs
        steps = self._encoded((x.shape[1:], *(tensor.shape for tensor in state)))
        kernel = cuda_build.loaded(KERNEL) if steps is not None and cuda_call.alike((x, *state)) else None
        if steps is None or kernel is None or x.dim() != 2:
            return reference.mlp(inputs, state, self._steps).contiguous()
        out = x.new_empty(x.shape[0], width_of(state, self._steps))
        cuda_call.launch(kernel.fxopt_mlp, parameters(x, out, state, steps, len(self._steps)), x)
        return out

    def _encoded(self, shapes: Shapes) -> bytes | None:
        if self._known[0] != shapes:
            self._known = shapes, encode(self._steps, shapes[0], shapes[1:])
        return self._known[1]


def width_of(state: Sequence[Tensor], steps: Sequence[Step]) -> int:
    """How many columns a chain leaves."""
    last = next(step.tensors[0] for step in reversed(steps) if step.op == Op.LINEAR)
    assert last is not None
    return state[last].shape[0]


def parameters(x: Tensor, out: Tensor, state: Sequence[Tensor], steps: bytes, count: int) -> bytes:
    """mlp.cu's Chain."""
    return cuda_call.operands((x, out, *state), MOST_OPERANDS) + struct.pack("<2i", x.shape[0], count) + steps


def encode(steps: Sequence[Step], row: torch.Size, state: Sequence[torch.Size]) -> bytes | None:
    """The steps as mlp.cu reads them, for rows and state of these shapes; None where it would not serve."""
    if len(steps) > MOST_STEPS or len(state) > MOST_OPERANDS - 2 or steps[0].op != Op.LINEAR or len(row) != 1:
        return None
    encoded, (N,) = b"", row
    for step in steps:
        K, tensors = N, [None if at is None else state[at] for at in step.tensors]
        if step.op == Op.LINEAR:
            weight, *tensors = tensors
            if weight is None or len(weight) != 2 or weight[1] != K or not 0 < weight[0] <= MOST_ON_CUDA:
                return None
            N = weight[0]
        if step.op == Op.LAYER_NORM or any(t is not None and tuple(t) not in ((N,), (1,)) for t in tensors):
            return None
        numbers = (-1 if at is None else at + 2 for at in (*step.tensors, *(None,) * TENSORS)[:TENSORS])
        encoded += struct.pack(_STEP, step.op, N, K, *numbers, *(*step.constants, 0.0, 0.0)[:2])
    return encoded.ljust(MOST_STEPS * struct.calcsize(_STEP), b"\0")
