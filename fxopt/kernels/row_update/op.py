"""fxopt::row_update: an optimizer's step on the rows of tables that have a gradient, in place.

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


Tensors = Sequence[Tensor]  # one or more of each table


def row_update(tables: Tensors, state: Tensors, rows: Tensors, grads: Tensors, constants: Tensor, kind: int) -> None:
    """In PyTorch.

    Args:
        tables: each [R, D], contiguous, of one dtype.
        state: of one table after the other, in its dtype: nothing for SGD, s [R] for rowwise Adagrad, m [R, D] and
            v [R, D] for Adam.
        rows: of each table int64 [n]; the kernel of the CPU refuses what is not strictly growing, that of CUDA leaves
            out bad rows, and takes a row again if its gradient is zero there.
        grads: of each table [n, D].
        constants: from :func:`constants`.
        kind: a :class:`Kind`.
    """
    rate, eps, beta1, beta2, root = constants.tolist()
    for table, own, where, grad in zip(tables, _by_table(tables, state), rows, grads, strict=True):
        touched = (grad != 0).any(1)
        where, grad = where[touched], grad[touched]
        if kind == Kind.SGD:
            step = rate * grad
        elif kind == Kind.ROWWISE_ADAGRAD:
            sums = own[0][where] + grad.square().mean(1)
            own[0][where] = sums
            step = (rate / (sums.sqrt() + eps))[:, None] * grad
        else:
            m, v = own[0][where] * beta1 + (1 - beta1) * grad, own[1][where] * beta2 + (1 - beta2) * grad.square()
            own[0][where], own[1][where] = m, v
            step = rate * m / (v.sqrt() / root + eps)
        table[where] -= step


def _by_table(tables: Tensors, state: Tensors) -> list[Tensors]:
    each = len(state) // max(1, len(tables))
    return [state[t * each : (t + 1) * each] for t in range(len(tables))]


def packed(tables: Tensors, state: Tensors, rows: Tensors, grads: Tensors, constants: Tensor, kind: int) -> bytes:
    """update.cu's Launch, for at most MOST_TABLES."""
    rate, eps, beta1, beta2, root = constants.tolist()
    numbers = rate, eps, beta1, beta2, 1 - beta1, 1 - beta2, root
    parts = [struct.pack("<7f3i", *numbers, kind, len(tables), 0)]
    for table, own, where, grad in zip(tables, _by_table(tables, state), rows, grads, strict=True):
        first, second = (*(tensor.data_ptr() for tensor in own), 0, 0)[:2]
        pointers = table.data_ptr(), first, second, where.data_ptr(), grad.data_ptr()
        parts.append(struct.pack("<5q3q2i", *pointers, *grad.shape, table.shape[0], 0, 0))
    return b"".join((*parts, bytes(_PART * (MOST_TABLES - len(tables)))))


MOST_TABLES, _PART = 48, 72  # of a launch, and the bytes of update.cu's Part


def _on_cuda(tables: Tensors, state: Tensors, rows: Tensors, grads: Tensors, constants: Tensor, kind: int) -> None:
    device = tables[0].device
    floats = (*tables, *state, *grads)
    fits = all(t.dtype is torch.float32 and t.is_contiguous() and t.device == device for t in floats)
    fits = fits and all(where.is_contiguous() and where.device == device for where in rows)
    library = cuda_build.loaded(CUDA, tables[0].get_device()) if fits else None
    each = len(state) // len(tables)
    for at in range(0, len(tables), MOST_TABLES):
        some = slice(at, at + MOST_TABLES)
        own = state[some.start * each : some.stop * each]
        arguments = tables[some], own, rows[some], grads[some], constants, kind
        if library is None:
            row_update(*arguments)
        else:
            cuda_call.launch(library.fxopt_row_update, packed(*arguments), tables[0])


def _fake(*arguments: object) -> None:
    return None


_SCHEMA = (
    "row_update(Tensor(a!)[] tables, Tensor(b!)[] state, Tensor[] rows, Tensor[] grads, Tensor constants, int kind)"
    " -> ()"
)
OPERATORS = Operators((Operator(_SCHEMA, row_update, _fake, others={"CUDA": _on_cuda}),), KERNEL)
