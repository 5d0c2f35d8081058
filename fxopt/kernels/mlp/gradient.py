"""fxopt::linear_backward: in one pass, what the gradients of a linear layer are products and sums of."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..operators import Operator, Operators
from .library import KERNEL, LINEAR_BACKWARD
from .plan import Op

aten = torch.ops.aten

FROM_RESULT: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.RELU: lambda grad, y: aten.threshold_backward(grad, y, 0),
    Op.SIGMOID: aten.sigmoid_backward.default,
    Op.TANH: aten.tanh_backward.default,
}


def linear_backward(grad: Tensor, y: Tensor | None, op: int) -> list[Tensor]:
    """From the gradient of what follows a linear layer, that of what the layer gave. The kernel's own definition.

    Args:
        grad: [M, N], float32.
        y: [M, N], what the step behind the layer gave; None: the layer's result is what grad is of.
        op: that step, of :data:`FROM_RESULT`.

    Returns:
        The gradient, [M, N], only where there is a `y`; the same turned over, [N, M]; its sums over M, [N].
    """
    found, turned, sums = _by_torch(grad, y, op)
    return [*([] if y is None else [found]), turned.contiguous(), sums]


def call(grad: Tensor, y: Tensor | None, op: Op) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient itself, turned over, and summed: :func:`linear_backward`, past the dispatcher where it can be."""
    if grad.dtype == torch.float32:
        found = OPERATORS.past_dispatcher("linear_backward")(_rows(grad), None if y is None else _rows(y), _word(op))
        if found is not None:
            return tuple(found) if y is not None else (grad, *found)
    return _by_torch(grad, y, op)


def _by_torch(grad: Tensor, y: Tensor | None, op: int) -> tuple[Tensor, Tensor, Tensor]:
    found = grad if y is None else FROM_RESULT[Op(op)](grad, y)
    return found, found.t(), found.sum(0)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@functools.cache
def _word(op: Op) -> Tensor:
    return torch.tensor([op], device="cpu")


def _fake(grad: Tensor, y: Tensor | None, op: int) -> list[Tensor]:
    M, N = grad.shape
    return [*([] if y is None else [grad.new_empty((M, N))]), grad.new_empty((N, M)), grad.new_empty((N,))]


OPERATORS = Operators((Operator(LINEAR_BACKWARD, linear_backward, _fake),), KERNEL)
