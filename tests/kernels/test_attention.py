"""fxopt::attention against two products and a softmax or a gate: instruction sets, masks, strides, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.kernels.attention import op
from fxopt.kernels.attention import plan as p
from fxopt.kernels.attention.plan import Axis, Operand, Plan

H = 3


def plan_of(
    L: int, d: int, masking: int = p.NO_MASK, weights: bool = True, fill: float = -1e9, gated: bool = False
) -> Plan:
    """q, k and v side by side in [B, L, 3 H d]; masks [B, L]; a gate's bias [H, L, L]; the result as [B, L, H, d]."""

    def side(number: int) -> Operand:
        axes = (Axis(0, 1, -1), Axis(2, d, H), Axis(1, 1, L), Axis(2, 1, d))
        return Operand(axes, ((2, number * H * d),) if number else ())

    masked = masking in (p.FILL_SET, p.FILL_UNSET, p.ADDED)
    mask = Operand((Axis(0, 1, -1), Axis(-1, 0, 1), Axis(-1, 0, 1), Axis(1, 1, L))) if masked else None
    plan = Plan(side(0), side(1), side(2), mask, masking, fill, 0.7, (0, 2, 1, 3), weights)
    bias = Operand((Axis(-1, 0, 1), Axis(0, 1, H), Axis(1, 1, L), Axis(2, 1, L)))
    return replace(plan, weighing=p.SILU, divisor=9.0, bias=bias) if gated else plan


def eager(
    x: Tensor, mask: Tensor | None, masking: int, fill: float = -1e9, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """bias: of a gate."""
    q, k, v = (side.unflatten(-1, (H, -1)).transpose(1, 2) for side in x.chunk(3, -1))
    scores = q @ k.mT * 0.7 + (0 if bias is None else bias)
    if masking == p.CAUSAL:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), fill)
    elif mask is not None:
        mask = mask[:, None, None]
        scores = scores + mask if masking == p.ADDED else scores.masked_fill(mask ^ (masking == p.FILL_UNSET), fill)
    weights = scores.softmax(-1) if bias is None else F.silu(scores) / 9
    return (weights @ v).transpose(1, 2), weights


def mask_of(B: int, L: int, masking: int) -> Tensor | None:
    if masking == p.ADDED:
        return torch.randn(B, L)
    return torch.rand(B, L) < 0.5 if masking in (p.FILL_SET, p.FILL_UNSET) else None


def run(x: Tensor, mask: Tensor | None, plan: Plan, bias: Tensor | None = None) -> list[Tensor]:
    words = plan.words()
    return list(op.call_of(words)(x, x, x, [each for each in (mask, bias) if each is not None], words))


@pytest.mark.parametrize("masking", range(5))
@pytest.mark.parametrize("sizes", [(2, 1, 1), (3, 26, 8), (2, 61, 19), (0, 4, 3)])
def test_every_instruction_set(isa: None, sizes: tuple[int, int, int], masking: int) -> None:
    torch.manual_seed(0)
    B, L, d = sizes
    x, mask = torch.randn(B, L, 3 * H * d), mask_of(B, L, masking)
    exact = eager(x.double(), mask, masking)
    for found, expected in zip(run(x, mask, plan_of(L, d, masking)), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masking", range(5))
@pytest.mark.parametrize("sizes", [(2, 1, 1), (3, 26, 8), (2, 61, 19), (0, 4, 3)])
def test_gates_with_a_bias(isa: None, sizes: tuple[int, int, int], masking: int) -> None:
    torch.manual_seed(0)
    B, L, d = sizes
    x, mask, bias = torch.randn(B, L, 3 * H * d), mask_of(B, L, masking), torch.randn(H, L, L)
    exact = eager(x.double(), mask, masking, -1e4, bias)
    plan = plan_of(L, d, masking, fill=-1e4, gated=True)
    for found, expected in zip(run(x, mask, plan, bias), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masking", range(5))
def test_gradients_of_gates(masking: int, weights: bool) -> None:
    torch.manual_seed(0)
    x, mask, bias = torch.randn(4, 6, 3 * H * 5), mask_of(4, 6, masking), torch.randn(H, 6, 6)
    plan = plan_of(6, 5, masking, weights, fill=0.3, gated=True)
    results = []
    for function in (lambda x, b: run(x, mask, plan, b), lambda x, b: eager(x, mask, masking, 0.3, b)):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        outputs = function(*leaves)
        total = outputs[0].square().sum() + (outputs[1].pow(3).sum() if weights else 0)
        results.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("safe", [False, True])
def test_rows_without_keys(safe: bool) -> None:
    x, mask = torch.randn(2, 5, 3 * H * 4), torch.tensor([[True] * 5, [False] * 5])
    plan = plan_of(5, 4, p.FILL_SET, fill=-torch.inf)
    found = run(x, mask, Plan(**{**vars(plan), "safe": safe}))[0]
    assert bool((found[0] == 0).all() if safe else found[0].isnan().all())
    torch.testing.assert_close(found[1], eager(x, mask, p.FILL_SET, -torch.inf)[0][1])


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masking", range(5))
def test_gradients(masking: int, weights: bool) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 3 * H * 5), mask_of(4, 6, masking)
    if mask is not None and mask.dtype == torch.bool:
        mask[0] = masking == p.FILL_SET  # all of a row filled: no gradient to its scores
    results = []
    for function in (lambda x: run(x, mask, plan_of(6, 5, masking, weights)), lambda x: eager(x, mask, masking)):
        leaf = x.clone().requires_grad_()
        outputs = function(leaf)
        total = outputs[0].square().sum() + (outputs[1].pow(3).sum() if weights else 0)
        results.append(torch.autograd.grad(total, leaf)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("masking", [p.NO_MASK, p.CAUSAL, p.FILL_UNSET])
def test_what_is_no_number_arrives_in_every_gradient(masking: int, without: bool) -> None:
    """As in torch's own attention, which adds its masks; without: a row of the batch has no key."""
    plan = replace(plan_of(3, 4, masking, fill=-torch.inf), safe=True)
    x = torch.randn(2, 3, 3 * H * 4, requires_grad=True)
    mask = torch.tensor([[not without] * 3, [True, False, True]]) if masking == p.FILL_UNSET else None
    q, k, v = (side.unflatten(-1, (H, -1)).transpose(1, 2) for side in x.chunk(3, -1))
    added = None if mask is None else mask[:, None, None].expand(2, 1, 3, 3)
    expected = F.scaled_dot_product_attention(q, k, v, added, is_causal=masking == p.CAUSAL, scale=0.7).transpose(1, 2)
    coming = torch.randn_like(expected)
    coming[0, 1] = torch.nan
    (found,) = torch.autograd.grad(run(x, mask, plan)[0], x, coming)
    torch.testing.assert_close(found, *torch.autograd.grad(expected, x, coming), equal_nan=True)


def test_other_dtypes_and_strides() -> None:
    x = torch.randn(3, 7, 3 * H * 4)
    plan = plan_of(7, 4)
    expected = run(x, None, plan)[0]
    torch.testing.assert_close(run(x.double(), None, plan)[0].float(), expected, rtol=1e-5, atol=1e-5)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch.testing.assert_close(run(strided, None, plan)[0], expected)


def test_opcheck() -> None:
    op.OPERATORS.load()
    x = torch.randn(2, 4, 3 * H * 2, requires_grad=True)
    torch.library.opcheck(torch.ops.fxopt.attention.default, (x, x, x, [], plan_of(4, 2).words()))


def test_plans_survive_words_and_are_checked() -> None:
    for plan in (plan_of(5, 2, p.ADDED), plan_of(5, 2, p.FILL_SET, gated=True)):
        assert Plan.of(plan.words()) == plan
    with pytest.raises(RuntimeError, match="inside of their tensor"):
        run(torch.randn(2, 4, 3 * H * 2), None, plan_of(5, 2))
