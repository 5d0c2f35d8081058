"""fxopt::target_attention against a concatenation that exists: every instruction set, dtype, size and stride."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.kernels.target_attention import op
from fxopt.kernels.target_attention import plan as p
from fxopt.kernels.target_attention.plan import CONSTANT, PARAMETER, Norm, Plan, Step, TailStep, Term

H = 19


def plan_of(D: int) -> Plan:
    """Dice, PReLU, a masked softmax."""
    return Plan(
        weight=0,
        bias=1,
        terms=(
            *(Term(0, -1, 0, D, 1.0), Term(-1, 0, D, D, 1.0), Term(0, -1, 2 * D, D, 1.0)),
            *(Term(-1, 0, 2 * D, D, -1.0), Term(0, 0, 3 * D, D, 1.0)),
        ),
        layers=((2, 3), (4, -1)),
        norms=(Norm(5, 6, -1, 7, 1e-5),),
        constants=(1.0,),
        steps=(
            *(Step(p.BATCH_NORM, 1, 0, 0), Step(p.SIGMOID, 1, 1), Step(p.SUB, 2, CONSTANT, 1)),
            *(Step(p.MUL, 2, 2, PARAMETER + 8), Step(p.MUL, 2, 2, 0), Step(p.MUL, 1, 1, 0), Step(p.ADD, 0, 1, 2)),
            *(Step(p.LINEAR, 1, 0, 0), Step(p.PRELU, 1, 1, PARAMETER + 9), Step(p.LINEAR, 2, 1, 1)),
        ),
        score=2,
        tail=(TailStep(p.SCALE, -1, 0.5), TailStep(p.FILL, 0, -1e9), TailStep(p.SOFTMAX)),
        values=0,
    )


def eager(q: Tensor, k: Tensor, mask: Tensor, params: list[Tensor]) -> Tensor:
    q = q.unsqueeze(1).expand_as(k)
    x = F.linear(torch.cat([q, k, q - k, q * k], -1), params[0], params[1])
    normed = (x - params[5]) / (params[6] + 1e-5).sqrt() + params[7]
    s = torch.sigmoid(normed)
    x = (1 - s) * params[8] * x + s * x
    x = F.linear(x, params[2], params[3])
    x = F.linear(torch.where(x > 0, x, params[9] * x), params[4]).squeeze(-1) * 0.5
    weights = x.masked_fill(~mask, -1e9).softmax(-1)
    return (weights.unsqueeze(-1) * k).sum(1)


def inputs(B: int, T: int, D: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    params = [some(H, 4 * D) / D**0.5, some(H), some(5, H) / 4, some(5), some(1, 5)]
    params += [some(H) * 0.3, some(H).abs() + 0.5, some(H), some(H), some(5)]
    return some(B, D), some(B, T, D), torch.rand(B, T) < 0.6, params


def run(q: Tensor, k: Tensor, mask: Tensor, params: list[Tensor]) -> Tensor:
    words = plan_of(q.shape[1]).words()
    return op.call_of(words)([q], [k], [mask], params, words)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 49, 7), (2, 97, 33), (5, 12, 16), (0, 4, 3), (4, 0, 3)])
def test_every_instruction_set(isa: None, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    q, k, mask, params = inputs(*sizes)
    exact = eager(q.double(), k.double(), mask, [x.double() for x in params])
    torch.testing.assert_close(run(q, k, mask, params).double(), exact, rtol=2e-5, atol=2e-5)


def test_strides() -> None:
    q, k, mask, params = inputs(6, 11, 8)
    strided = [x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2] for x in params]
    expected = run(q, k, mask, params)
    found = run(q.t().contiguous().t(), k.mT.contiguous().mT, mask.t().contiguous().t(), strided)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        run(q[:1].expand_as(q), k[:, ::2], mask[:1, ::2].expand(6, 6), params),
        eager(q[:1].expand_as(q), k[:, ::2], mask[:1, ::2].expand(6, 6), params),
        rtol=1e-4,
        atol=1e-5,
    )


def test_not_finite_as_in_eager() -> None:
    q, k, mask, params = inputs(4, 9, 5)
    mask[0] = False
    k[1, 2], k[2, 3] = torch.nan, torch.inf
    torch.testing.assert_close(run(q, k, mask, params), eager(q, k, mask, params), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gradients() -> None:
    q, k, mask, params = inputs(5, 7, 4)
    given = [q, k, *params]
    results = []
    for function in (run, eager):
        leaves = [x.clone().requires_grad_() for x in given]
        results.append(torch.autograd.grad(function(leaves[0], leaves[1], mask, leaves[2:]).square().sum(), leaves))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_many_rows_are_split() -> None:
    q, k, mask, params = inputs(700, 60, 4, torch.float64)
    torch.testing.assert_close(run(q, k, mask, params), eager(q, k, mask, params))


def test_opcheck() -> None:
    q, k, mask, params = inputs(3, 4, 2)
    tensors = [[x.requires_grad_() for x in part] for part in ([q], [k])]
    words = plan_of(2).words()
    op.OPERATORS.load()
    torch.library.opcheck(torch.ops.fxopt.target_attention.default, (*tensors, [mask], params, words))


def test_plans_survive_words() -> None:
    plan = dataclasses.replace(plan_of(3), values=-1)
    assert Plan.of(plan.words()) == plan


def test_plans_that_do_not_fit_are_refused() -> None:
    q, k, mask, params = inputs(3, 4, 2)
    words = plan_of(3).words()
    with pytest.raises(RuntimeError, match="as wide as their terms"):
        op.call_of(words)([q], [k], [mask], params, words)
    with pytest.raises(RuntimeError, match="a whole plan"):
        op.call_of(words[:20])([q], [k], [mask], params, words[:20])
