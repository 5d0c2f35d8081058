"""The plan in plain PyTorch: what the kernel is tested against, where gradients come from, and what runs without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import REDUCTIONS, Input, Operand, Plan, Step

_STEPS: dict[str, Callable[..., Tensor]] = {
    "copy": lambda x: x,
    "not": lambda x: 1 - x,
    "isnan": torch.isnan,
    "softplus": F.softplus,
    "silu": F.silu,
    "gelu": F.gelu,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "xor": lambda a, b: (a != 0) ^ (b != 0),
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x, weight: torch.where(x > 0, x, x * weight),
    "where": lambda mask, a, b: torch.where(mask != 0, a, b),
    "fma": lambda a, b, c: a * b + c,
}


def pointwise(inputs: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Every output of the plan. Float64 inputs make it compute in float64, else it computes in float32."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in inputs) else torch.float32
    sizes = sizes_of(inputs, plan)
    values = [_aligned(tensor, given, plan.axes).to(dtype) for tensor, given in zip(inputs, plan.inputs, strict=True)]
    for step in plan.steps:
        values.append(_result(step, values, sizes, dtype))
    results = []
    for output in plan.outputs:
        result = values[output.value].reshape([1 if axis is None else sizes[axis] for axis in output.dims])
        results.append(result != 0 if output.boolean else result.contiguous())
    return [result.clone() if any(result is value for value in values) else result for result in results]


def calls_of(inputs: Sequence[Tensor], plan: Plan) -> list[Sequence[Tensor]]:
    """The inputs of each call of a plan, of those of several calls behind each other."""
    n = len(plan.inputs)
    return [inputs[at : at + n] for at in range(0, len(inputs), n)]


def of_calls(inputs: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """The outputs of each of those calls, behind each other."""
    return [output for call in calls_of(inputs, plan) for output in pointwise(call, plan)]


def sizes_of(inputs: Sequence[Tensor], plan: Plan) -> list[int]:
    """The size of every axis."""
    sizes: dict[int, int] = {}
    for tensor, given in zip(inputs, plan.inputs, strict=True):
        if tensor.dim() != len(given.dims):
            raise RuntimeError(f"fxopt.pointwise: expected {len(given.dims)} dims, found {list(tensor.shape)}")
        for size, axis in zip(tensor.shape, given.dims, strict=True):
            if axis is not None:
                sizes.setdefault(axis, size)
    return [sizes[axis] for axis in range(plan.axes)]


def empty_outputs(inputs: Sequence[Tensor], plan: Plan, sizes: Sequence[int]) -> list[Tensor]:
    """Memory for every output of a plan, contiguous, for axes of these sizes."""
    return [
        inputs[0].new_empty(
            [1 if axis is None else sizes[axis] for axis in output.dims],
            dtype=torch.bool if output.boolean else torch.float32,
        )
        for output in plan.outputs
    ]


def _aligned(tensor: Tensor, given: Input, axes: int) -> Tensor:
    """The tensor with one dim an axis, of size 1 where it has none."""
    order = sorted((axis, dim) for dim, axis in enumerate(given.dims) if axis is not None)
    ones = [dim for dim, axis in enumerate(given.dims) if axis is None]
    present = tensor.permute([dim for _, dim in order] + ones)
    size = {axis: tensor.shape[dim] for axis, dim in order}
    return present.reshape([size.get(axis, 1) for axis in range(axes)])


def _result(step: Step, values: list[Tensor], sizes: list[int], dtype: torch.dtype) -> Tensor:
    operands = [_operand(operand, values) for operand in step.operands]
    source = operands[0]
    if step.op == "expand":
        assert isinstance(source, Tensor)
        return source.expand([sizes[axis] if axis in step.axes else 1 for axis in range(len(sizes))])
    if step.op in REDUCTIONS:
        assert isinstance(source, Tensor)
        return _reduced(step, source, len(sizes))
    if step.op != "where" and not isinstance(source, Tensor):
        operands[0] = torch.tensor(source, dtype=dtype, device="cpu")
    function = _STEPS.get(step.op) or getattr(torch, step.op)
    return function(*operands).to(dtype)


def _operand(operand: Operand, values: list[Tensor]) -> Tensor | float:
    return values[operand] if isinstance(operand, int) else operand


def _reduced(step: Step, source: Tensor, axes: int) -> Tensor:
    over = [axis for axis in range(axes) if axis not in step.axes]
    if step.op == "peak":
        largest = torch.amax if source.numel() else torch.sum  # of nothing, where a softmax has no elements
        return largest(source.detach(), over, keepdim=True)
    return getattr(torch, step.op)(source, over, keepdim=True)
