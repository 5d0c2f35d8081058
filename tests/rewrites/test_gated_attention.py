"""Attention whose weights are silu(scores) / n, and a bias below a mask: spellings, gradients, and what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize

H, D = 2, 4
Masking = Callable[[Tensor, Tensor], Tensor]
MASKS: dict[str, Masking] = {
    "none": lambda scores, keep: scores,
    "masked_fill": lambda scores, keep: scores.masked_fill(~keep, -1e4),
    "where": lambda scores, keep: torch.where(keep, scores, -1e4),
    "where, the other way": lambda scores, keep: torch.where(~keep, -1e9, scores),
    "where with a tensor": lambda scores, keep: torch.where(keep, scores, torch.tensor(0.3)),
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda scores: F.silu(scores) / 50,
    "silu in steps": lambda scores: F.silu(scores) * 0.5 / 9,
    "silu alone": F.silu,
    "softmax": lambda scores: scores.softmax(-1),
}


class Gated(nn.Module):
    def __init__(self, mask: Masking, weigh: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.sides = nn.Linear(6, 3 * H * D)
        self.bias = nn.Parameter(torch.randn(H, 30, 30)) if bias else None
        self.mask, self.weigh = mask, weigh

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = (side.reshape(B, L, H, D).transpose(1, 2) for side in F.silu(self.sides(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 0.5
        if self.bias is not None:
            scores = scores + self.bias[:, :L, :L]
        scores = self.mask(scores, keep[:, None, None])
        return (self.weigh(scores) @ v).transpose(1, 2).reshape(B, L, H * D)


def operators(fast: nn.Module) -> set[str]:
    return {c.what.split(": ")[-1].split(" ")[0] for f in fast._fxopt.findings for p in f.passes for c in p.changes}  # type: ignore


def inputs(B: int, L: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(B, L, 6), torch.rand(B, L) < 0.6


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weigh", WEIGHTS)
@pytest.mark.parametrize("mask", MASKS)
def test_spellings(mask: str, weigh: str, bias: bool, grad: bool) -> None:
    torch.manual_seed(0)
    model = Gated(MASKS[mask], WEIGHTS[weigh], bias).eval()
    with torch.set_grad_enabled(grad):
        fast = optimize(model, inputs(5), Config(tune="off"))
        assert "attention" in operators(fast)
        for B in (5, 1, 0):
            x, keep = inputs(B)
            x.requires_grad_(grad)
            found, expected = fast(x, keep), model(x, keep)
            torch.testing.assert_close(found, expected)
            if grad and B:
                cotangent = torch.randn_like(expected)
                wanted = [x, *model.parameters()]
                for one, other in zip(
                    *(torch.autograd.grad(y, wanted, cotangent) for y in (found, expected)), strict=True
                ):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Layers(nn.Module):
    """Two layers of experts with silu between: their weights are no keys and no values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 6, 5)), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.first)), self.second)


@pytest.mark.parametrize("model", [Layers(), Gated(MASKS["none"], lambda scores: F.silu(scores) / 1e25 / 1e25, False)])
def test_what_is_none(model: nn.Module) -> None:
    x = torch.randn(3, 7, 6), torch.ones(3, 7, dtype=torch.bool)
    with torch.no_grad():
        fast = optimize(model.eval(), x, Config(tune="off"))
        assert "attention" not in operators(fast)
        torch.testing.assert_close(fast(*x), model(*x))
