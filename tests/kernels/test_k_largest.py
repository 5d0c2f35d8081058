"""fxopt::k_largest: topk's values on every instruction set."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.k_largest import op


@pytest.mark.parametrize("k", [1, 3, 26])
@pytest.mark.parametrize(("outer", "inner"), [(0, 4), (1, 1), (7, 1), (40, 3), (5, 16), (3, 35), (4, 0)])
def test_is_topk(isa: None, outer: int, inner: int, k: int) -> None:
    x = torch.randn(outer, 26, inner)
    torch.testing.assert_close(op.call_of(k)(x, k), torch.topk(x, k, 1).values, rtol=0, atol=0)
    strided = torch.randn(inner, outer, 52).permute(1, 2, 0)[:, ::2]
    torch.testing.assert_close(op.call_of(k)(strided, k), torch.topk(strided, k, 1).values, rtol=0, atol=0)


def test_nan_is_the_largest(isa: None) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-45, -1e-45, 3.0, 3.0, -3.0, -nan])
    x = torch.stack([values[torch.randperm(11)] for _ in range(20)], 1).unsqueeze(0)
    torch.testing.assert_close(op.call_of(11)(x, 11), torch.topk(x, 11, 1).values, rtol=0, atol=0, equal_nan=True)


def test_declarations_and_gradients() -> None:
    x = torch.randn(3, 5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fxopt.k_largest.default, (x, 2))
    seed = torch.randn(3, 2, 4)
    expected = torch.autograd.grad(torch.topk(x, 2, 1).values, x, seed)
    torch.testing.assert_close(torch.autograd.grad(op.call_of(2)(x, 2), x, seed), expected)


def test_refuses_what_does_not_fit(isa: None) -> None:
    for x, k in ((torch.randn(3, 5, 4), 6), (torch.randn(3, 5, 4), 0), (torch.randn(3, 5), 2)):
        with pytest.raises(RuntimeError, match="k_largest"):
            torch.ops.fxopt.k_largest(x, k)
