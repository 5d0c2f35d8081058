"""fxopt::gpu_joined_linear: a linear layer of tensors side by side, on CUDA, without gradients.

Long ones are multiplied as they lie, in parts as gpu_linear does; what is left of them, and the short ones, are joined.
FiBiNET joins 10400 numbers of its pairs with 13 others, so that no row starts at 16 bytes any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import LONG_PIECE, SHORT_IN
from . import linear
from .linear import KERNEL, MOST_COUNTED, PARTS, gpu_linear, in_parts, short
from .ways import FEWEST_ROWS, MOST_ROWS


def reference(pieces: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """What the model wrote."""
    return linear.reference(torch.cat(list(pieces), 1), weight, bias, activation)


def gpu_joined_linear(pieces: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """gpu_linear(cat(pieces, 1), weight, bias, activation): pieces [M, K_i], weight [N, K] -> [M, N]."""
    parts = _parts(pieces)
    ends = [in_parts(piece.shape[1], parts) if _is_long(piece) else 0 for piece in pieces]
    kernel = cuda_build.loaded(KERNEL, weight.get_device()) if _fits(pieces, ends, weight, bias) else None
    if kernel is None:
        return gpu_linear(torch.cat(list(pieces), 1), weight, bias, activation)
    out = _fake(pieces, weight, bias, activation)
    partial = weight.new_empty(parts * sum(map(bool, ends)), *out.shape)
    left, made, start = list[tuple[Tensor, Tensor]](), 0, 0
    for piece, end in zip(pieces, ends, strict=True):
        weights = weight[:, start : start + piece.shape[1]]
        if end:
            linear.sums_of_parts(kernel, piece, _aligned(weights[:, :end]), end, partial[made : made + parts])
            made += parts
        left.append((piece[:, end:], weights[:, end:]))
        start += piece.shape[1]
    x, weights = (torch.cat(tensors, 1) for tensors in zip(*left, strict=True))
    return cuda_call.filled(kernel.fxopt_linear_finish, short(x, weights, bias, out, activation, partial), out)


def _is_long(piece: Tensor) -> bool:
    return piece.shape[1] >= LONG_PIECE


def _parts(pieces: Sequence[Tensor]) -> int:
    """Of each long piece: many rows keep all multiprocessors busy."""
    return max(1, PARTS // max(1, sum(map(_is_long, pieces)))) if len(pieces[0]) <= MOST_ROWS else 1


def _fits(pieces: Sequence[Tensor], ends: Sequence[int], weight: Tensor, bias: Tensor | None) -> bool:
    whole = [weight, *(piece for piece in pieces if _is_long(piece)), *([] if bias is None else [bias])]
    close = weight.dtype is torch.float32 and all(t.is_contiguous() for t in whole)
    alike = cuda_call.alike((*pieces, weight, bias)) and close
    (M, _), (N, K) = pieces[0].shape, weight.shape
    sizes = all(len(piece) == M for piece in pieces) and sum(piece.shape[1] for piece in pieces) == K
    few = 0 < sum(map(bool, ends)) <= PARTS and K - sum(ends) <= SHORT_IN and FEWEST_ROWS <= M < MOST_COUNTED
    return alike and sizes and few and N > 0 and N % 4 == 0 and (bias is None or bias.shape == (N,))


def _aligned(weight: Tensor) -> Tensor:
    """With rows that start at 16 bytes: to copy [128, 10400] takes 4 us, and 256 rows save 16 by it."""
    return weight.contiguous() if weight.stride(0) % 4 or weight.data_ptr() % 16 else weight


def _fake(pieces: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return pieces[0].new_empty(pieces[0].shape[0], weight.shape[0])


_SCHEMA = "gpu_joined_linear(Tensor[] pieces, Tensor weight, Tensor? bias, str activation) -> Tensor"
OPERATORS = Operators((Operator(_SCHEMA, reference, _fake, facts=BY_ROWS),), cuda=KERNEL)
