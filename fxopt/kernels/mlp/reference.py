"""What a plan means, in PyTorch: the definition of right, the gradient, and what runs where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import Op, Step

Tensors = Sequence[Tensor | None]
Linear = Callable[..., Tensor]  # of x, weight and bias


def mlp(inputs: Sequence[Tensor], state: Tensors, steps: Sequence[Step], linear: Linear = F.linear) -> Tensor:
    """The steps, one after the other, on the inputs side by side. inputs [..., K_i], result [..., N]."""
    x = torch.cat(list(inputs), -1) if len(inputs) > 1 else inputs[0]
    for step in steps:
        x = apply(x, state, step, linear)
    return x


def apply(x: Tensor, state: Tensors, step: Step, linear: Linear = F.linear) -> Tensor:
    """One step."""
    tensors = [None if index is None else state[index] for index in step.tensors]
    if step.op == Op.LINEAR:
        return linear(x, *tensors[:2])
    return _STEPS[step.op](x, tensors, step.constants)


def _batch_norm(x: Tensor, tensors: Tensors, constants: Sequence[float]) -> Tensor:
    mean, variance, weight, bias = (*tensors, None, None)[:4]
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.1, constants[0])


def _dice(x: Tensor, tensors: Tensors, constants: Sequence[float]) -> Tensor:
    p, slope = _batch_norm(x, tensors[:4], constants).sigmoid(), tensors[4]
    assert slope is not None
    return slope * (1 - p) * x + p * x


_STEPS: dict[Op, Callable[[Tensor, Any, Sequence[float]], Tensor]] = {
    Op.BATCH_NORM: _batch_norm,
    Op.RELU: lambda x, t, c: x.relu(),
    Op.SIGMOID: lambda x, t, c: x.sigmoid(),
    Op.TANH: lambda x, t, c: x.tanh(),
    Op.SILU: lambda x, t, c: F.silu(x),
    Op.GELU: lambda x, t, c: F.gelu(x),
    Op.GELU_TANH: lambda x, t, c: F.gelu(x, approximate="tanh"),
    Op.LEAKY_RELU: lambda x, t, c: F.leaky_relu(x, c[0]),
    Op.PRELU: lambda x, t, c: F.prelu(x, t[0]),
    Op.ELU: lambda x, t, c: F.elu(x, c[0]),
    Op.SOFTPLUS: lambda x, t, c: F.softplus(x),
    Op.CLAMP: lambda x, t, c: x.clamp(c[0], c[1]),
    Op.DICE: _dice,
    Op.LAYER_NORM: lambda x, t, c: F.layer_norm(x, x.shape[-1:], t[0], t[1], c[0]),
    Op.HARDTANH: lambda x, t, c: F.hardtanh(x, c[0], c[1]),
}
