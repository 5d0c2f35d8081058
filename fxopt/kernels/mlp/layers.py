"""Layer by layer, through torch's libraries: for weights that no cache holds, and for gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Op, Step

_ONEDNN_FROM = 2e6  # multiply-adds: its call costs 12 us more than torch's, which at 50 a ns are 1e6
_WIDE, _MANY = 1 << 21, 64  # elements of a weight, and rows: [256, 2048] x [2048, 2048] is 1.6x the kernel there


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K] + bias, through the faster library; any strides."""
    if (
        x.dtype != torch.float32
        or x.numel() * weight.shape[0] < _ONEDNN_FROM
        or not torch.backends.mkldnn.is_available()
    ):
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, N] @ right [N, K], float32."""
    few = left.numel() * right.shape[1] < _ONEDNN_FROM
    return torch.mm(left, right) if few else linear(left, right.t())


def is_wide(N: int | torch.SymInt, K: int | torch.SymInt) -> bool:
    """Whether a weight [N, K] is too large for the kernel, which reads it as it lies, once for each block of rows."""
    return not (isinstance(N, int) and isinstance(K, int)) or N * K >= _WIDE


def pays(inputs: Sequence[Tensor], state: Sequence[Tensor | None], steps: Sequence[Step]) -> bool:
    """Whether there are many rows, and a weight is wide."""
    if inputs[0].numel() < _MANY * inputs[0].shape[-1]:
        return False
    weights = (state[step.tensors[0]] for step in steps if step.op == Op.LINEAR)  # type: ignore[index]
    return any(weight is not None and is_wide(*weight.shape) for weight in weights)
