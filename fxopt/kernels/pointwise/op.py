"""fxopt::pointwise: pointwise operators, broadcasts and small reductions in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxopt.facts import Facts

from .. import gradients
from ..operators import Operator, Operators, cpu_library
from ..words import tensor_of
from . import reference
from .encode import plan_of

_SCHEMA = "pointwise(Tensor[] inputs, str plan) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "kernels.h", (_SCHEMA,))


def call(inputs: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Every output of a plan, each contiguous.

    Args:
        inputs: CPU tensors, float32, bool, uint8, int32 or int64, of any strides.
        plan: :func:`.encode.text` of a :class:`.plan.Plan`.

    Raises:
        RuntimeError: inputs that do not fit the plan.
    """
    outputs = OPERATORS.past_dispatcher("pointwise")(inputs, tensor_of(plan))
    return OPERATORS.recorded("pointwise", inputs, plan) if outputs is None else outputs


def _in_pytorch(inputs: list[Tensor], plan: str) -> list[Tensor]:
    return [output.clone() if output.requires_grad else output for output in reference.pointwise(inputs, plan_of(plan))]


def _fake(inputs: list[Tensor], plan: str) -> list[Tensor]:
    decoded = plan_of(plan)
    return reference.empty_outputs(inputs, decoded, reference.sizes_of(inputs, decoded))


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.plan = inputs
    ctx.save_for_backward(*tensors)
    gradients.mark(ctx, tensors, output, plan_of(ctx.plan).differentiable)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    """The gradients of the reference, computed again."""

    def pointwise(*tensors: Any) -> list[Tensor]:
        return reference.pointwise(tensors, plan_of(ctx.plan))

    return gradients.again(pointwise, ctx.saved_tensors, grads, list(map(bool, ctx.needs_input_grad[0]))), None


OPERATORS = Operators(
    (Operator(_SCHEMA, _in_pytorch, _fake, _backward, _setup_context, facts=Facts(rows="axes")),), KERNEL
)
