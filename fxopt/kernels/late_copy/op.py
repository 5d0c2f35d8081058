"""fxopt::late_copy: some columns of a tensor anew."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import Operator, Operators


def reference(x: Tensor, values: Tensor, offset: int) -> Tensor:
    """x [B, W] with values [B, L] from column `offset` on."""
    return torch.cat([x[:, :offset], values, x[:, offset + values.shape[1] :]], 1)


def late_copy(x: Tensor, values: Tensor, offset: int) -> Tensor:
    """The same in the memory of `x`, which nobody else reads."""
    x.narrow(1, offset, values.shape[1]).copy_(values)
    return x


def _fake(x: Tensor, values: Tensor, offset: int) -> Tensor:
    return torch.empty_like(x)


OPERATORS = Operators((Operator("late_copy(Tensor x, Tensor values, int offset) -> Tensor", reference, _fake),))
load = OPERATORS.load
