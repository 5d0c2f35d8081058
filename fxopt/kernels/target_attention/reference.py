"""Target attention in PyTorch, any dtype and device: the meaning of a plan, its gradients, and the fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import plan as p
from .plan import CONSTANT, PARAMETER, Norm, Plan, Step, Term

_CHUNK = 1 << 19  # elements of the widest layer at a time: 2 MB of fp32, the size of a second-level cache

_UNARY: dict[int, Callable[[Tensor], Tensor]] = {
    p.NEG: torch.neg,
    p.EXP: torch.exp,
    p.SIGMOID: torch.sigmoid,
    p.TANH: torch.tanh,
    p.SILU: F.silu,
}
_BINARY: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    p.ADD: torch.add,
    p.SUB: torch.sub,
    p.MUL: torch.mul,
    p.DIV: torch.div,
    p.MAXIMUM: torch.maximum,
    p.MINIMUM: torch.minimum,
    p.PRELU: lambda x, slope: torch.where(x > 0, x, slope * x),
}


def target_attention(
    rows: Sequence[Tensor], positions: Sequence[Tensor], masks: Sequence[Tensor], params: Sequence[Tensor], plan: Plan
) -> Tensor:
    """rows [B, D], positions [B, T, D], masks [B, T]: the scores [B, T], or their weighted sum [B, D].

    Half precision is computed in fp32 and rounded once.
    """
    dtype = positions[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    rows, positions, params = ([tensor.to(wide) for tensor in tensors] for tensors in (rows, positions, params))
    masks = [mask.to(wide) if mask.is_floating_point() else mask for mask in masks]
    scores = _scores(rows, positions, params, plan)
    scores = _tail(scores, masks, plan)
    if plan.values >= 0:
        scores = torch.bmm(scores.unsqueeze(1), positions[plan.values]).squeeze(1)
    return scores.to(dtype)


def rows_at_once(T: int, params: Sequence[Tensor], plan: Plan) -> int:
    """How many rows fit the cache."""
    widest = max(params[weight].shape[0] for weight in (plan.weight, *(weight for weight, _ in plan.layers)))
    return max(1, _CHUNK // max(1, T * widest))


def _scores(rows: Sequence[Tensor], positions: Sequence[Tensor], params: Sequence[Tensor], plan: Plan) -> Tensor:
    registers: dict[int, Tensor] = {0: _first_layer(rows, positions, params, plan)}

    def operand(number: int) -> Tensor:
        if number >= CONSTANT:
            return registers[0].new_tensor(plan.constants[number - CONSTANT])
        return params[number - PARAMETER] if number >= PARAMETER else registers[number]

    for step in plan.steps:
        x = operand(step.left)
        if step.op == p.LINEAR:
            weight, bias = plan.layers[step.right]
            y = F.linear(x, params[weight], params[bias].reshape(-1) if bias >= 0 else None)
        elif step.op == p.BATCH_NORM:
            y = _normalized(x, plan.norms[step.right], params)
        elif step.op in _UNARY:
            y = _UNARY[step.op](x)
        elif step.op in p.BOUNDS and max(step.left, step.right) >= CONSTANT:
            y = _bounded(step, x, operand(step.right))
        else:
            y = _BINARY[step.op](x, operand(step.right))
        registers[step.out] = y
    return registers[plan.score][..., 0]


def _bounded(step: Step, left: Tensor, right: Tensor) -> Tensor:
    """A relu or a clamp: they differ in the gradient at the bound."""
    if step.left >= CONSTANT:
        return right.relu()
    return left.clamp(min=right) if step.op == p.MAXIMUM else left.clamp(max=right)


def _first_layer(rows: Sequence[Tensor], positions: Sequence[Tensor], params: Sequence[Tensor], plan: Plan) -> Tensor:
    """The concatenation is never made: W (scale * q * k) is (scale * W * q) k, a weight of each row's own."""
    if positions[0].shape[1] == 0:  # no position reads a row: one of NaN gives weights no gradient of NaN
        rows = [torch.zeros_like(row) for row in rows]
    by_position: dict[int, Tensor] = {}
    once: Tensor = params[plan.bias].reshape(-1) if plan.bias >= 0 else positions[0].new_zeros(())
    for term in plan.terms:
        weight = _weight_of(term, params[plan.weight])
        if term.position < 0:
            once = once + F.linear(rows[term.row], weight).unsqueeze(1)
            continue
        if term.row >= 0:
            weight = weight * rows[term.row].unsqueeze(1)
        known = by_position.get(term.position)
        by_position[term.position] = weight if known is None else known + weight
    products = [torch.matmul(positions[index], weight.mT) for index, weight in by_position.items()]
    return sum(products[1:], products[0]) + once


def _weight_of(term: Term, weight: Tensor) -> Tensor:
    part = weight[:, term.start : term.start + term.width]
    return part if term.scale == 1 else part * term.scale


def _normalized(x: Tensor, norm: Norm, params: Sequence[Tensor]) -> Tensor:
    scale = (params[norm.variance] + norm.eps).rsqrt()
    if norm.weight >= 0:
        scale = scale * params[norm.weight]
    y = (x - params[norm.mean]) * scale
    return y + params[norm.bias] if norm.bias >= 0 else y


def _tail(scores: Tensor, masks: Sequence[Tensor], plan: Plan) -> Tensor:
    for step in plan.tail:
        if step.op == p.SOFTMAX:
            scores = scores.softmax(-1)
        elif step.op == p.SCALE:
            scores = scores * step.value
        elif step.op == p.SHIFT:
            scores = scores + step.value
        elif step.op == p.TIMES_MASK:
            scores = scores * masks[step.mask]
        elif step.op == p.PLUS_MASK:
            scores = scores + masks[step.mask]
        else:
            kept = masks[step.mask].bool() if step.op == p.FILL else ~masks[step.mask].bool()
            scores = torch.where(kept, scores, scores.new_tensor(step.value))
    return scores
