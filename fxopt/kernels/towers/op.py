"""fxopt::towers: parallel linears, mixtures of experts and what follows them, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxopt.torch_internals.operators import below_autograd
from fxopt.torch_internals.storage import storage_number

from ..operators import BY_ROWS, Operator, Operators, cpu_library
from ..words import tensor_of
from . import reference
from .plan import decode

_SCHEMA = "towers(Tensor[] inputs, Tensor[] weights, Tensor[] biases, str plan) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "program.h", "steps.h", (_SCHEMA,))


def call_of(plan: str) -> Callable[..., list[Tensor]]:
    """The operator with its plan, past the dispatcher where nothing is to be recorded."""
    return OPERATORS.call_of("towers", tensor_of(plan))


def _in_pytorch(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str
) -> list[Tensor]:
    made = reference.towers(inputs, weights, biases, decode(plan))
    given = {storage_number(tensor) for tensor in inputs}
    return [y.clone() if storage_number(y) in given else y.contiguous() for y in made]


def _recorded(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Gradients are those of the plain operators, of any order and for any of the arguments."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *weights, *biases)):
        return _in_pytorch(inputs, weights, biases, plan)
    with below_autograd():
        return torch.ops.fxopt.towers.default(inputs, weights, biases, plan)


def _fake(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str) -> list[Tensor]:
    decoded, first = decode(plan), inputs[0]
    leading = first.shape[: -2 if decoded.inner[0] else -1]
    shapes = [(b.inner, b.width // b.inner) if b.inner else (b.width,) for b in decoded.outputs]
    return [first.new_empty((*leading, *shape)) for shape in shapes]


OPERATORS = Operators(
    (
        Operator(
            _SCHEMA,
            _in_pytorch,
            _fake,
            others={"Autograd": _recorded},
            facts=BY_ROWS,
        ),
    ),
    KERNEL,
)
