"""fxopt::row_update: an optimizer's step on the rows of a table that have a gradient, in place.

With g the gradient of a row, summed over everything that read it, and w the row; a row with g = 0 stays as it is.

    SGD               w -= lr g
    rowwise Adagrad   s += mean(g^2);  w -= lr g / (sqrt(s) + eps)            s: a number for each row
    Adam              m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
                      w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)   t: the table's steps so far

These are FBGEMM's EXACT_SGD, EXACT_ROWWISE_ADAGRAD and ADAM (Mudigere et al., ISCA 2022).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from .. import cuda_build, cuda_call, entry, simd
from ..build import Library
from ..operators import Operator, Operators

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_row_update",
    sources=(_HERE / "cpu.cpp",),
    cflags=(*simd.CFLAGS, "-O3", entry.STABLE_ABI),
)

CUDA = cuda_build.CudaLibrary(
    "fxopt_row_update_cuda",
    source=_HERE / "update.cu",
    functions=("fxopt_row_update",),
)


class Kind(IntEnum):
    SGD = 0
    ROWWISE_ADAGRAD = 1
    ADAM = 2


def constants(lr: float, eps: float = 0.0, betas: tuple[float, float] = (0.0, 0.0), step: int = 0) -> Tensor:
    """What a step takes besides tensors: float64 [5]."""
    beta1, beta2 = betas
    rate, root = (lr / (1 - beta1**step), (1 - beta2**step) ** 0.5) if step else (lr, 1.0)
    return torch.tensor([rate, eps, beta1, beta2, root], dtype=torch.float64, device="cpu")


def row_update(
    table: Tensor, state: Sequence[Tensor], rows: Tensor, grads: Tensor, constants: Tensor, kind: int
) -> None:
    """In PyTorch.

    Args:
        table: [R, D], contiguous.
        state: [] for SGD, [s [R]] for rowwise Adagrad, [m [R, D], v [R, D]] for Adam; the table's dtype.
        rows: int64 [n], strictly growing; the kernel of the CPU refuses others, that of CUDA leaves out bad rows.
        grads: [n, D].
        constants: from :func:`constants`.
        kind: a :class:`Kind`.
    """
    rate, eps, beta1, beta2, root = constants.tolist()
    touched = (grads != 0).any(1)
    rows, grads = rows[touched], grads[touched]
    if kind == Kind.SGD:
        step = rate * grads
    elif kind == Kind.ROWWISE_ADAGRAD:
        sums = state[0][rows] + grads.square().mean(1)
        state[0][rows] = sums
        step = (rate / (sums.sqrt() + eps))[:, None] * grads
    else:
        m, v = state[0][rows] * beta1 + (1 - beta1) * grads, state[1][rows] * beta2 + (1 - beta2) * grads.square()
        state[0][rows], state[1][rows] = m, v
        step = rate * m / (v.sqrt() / root + eps)
    table[rows] -= step


def packed(table: Tensor, state: Sequence[Tensor], rows: Tensor, grads: Tensor, constants: Tensor, kind: int) -> bytes:
    """update.cu's Launch."""
    rate, eps, beta1, beta2, root = constants.tolist()
    first, second = (*(tensor.data_ptr() for tensor in state), 0, 0)[:2]
    pointers = table.data_ptr(), first, second, rows.data_ptr(), grads.data_ptr()
    numbers = rate, eps, beta1, beta2, 1 - beta1, 1 - beta2, root
    return struct.pack("<5q3q7f4x2i", *pointers, *grads.shape, table.shape[0], *numbers, kind, 0)


def _on_cuda(table: Tensor, state: Sequence[Tensor], rows: Tensor, grads: Tensor, constants: Tensor, kind: int) -> None:
    tensors = (table, *state, grads)
    fits = all(t.dtype is torch.float32 and t.is_contiguous() and t.device == table.device for t in tensors)
    fits = fits and rows.is_contiguous() and rows.device == table.device
    library = cuda_build.loaded(CUDA, table.get_device()) if fits else None
    if library is None:
        row_update(table, state, rows, grads, constants, kind)
    else:
        cuda_call.launch(library.fxopt_row_update, packed(table, state, rows, grads, constants, kind), table)


def _fake(*arguments: object) -> None:
    return None


_SCHEMA = (
    "row_update(Tensor(a!) table, Tensor(b!)[] state, Tensor rows, Tensor grads, Tensor constants, int kind) -> ()"
)
OPERATORS = Operators((Operator(_SCHEMA, row_update, _fake, others={"CUDA": _on_cuda}),), KERNEL)
