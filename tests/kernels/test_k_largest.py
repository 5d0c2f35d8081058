"""fxopt::k_largest: topk's values on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch

from fxopt.kernels.k_largest import op


@pytest.mark.parametrize("k", [1, 3, 26])
@pytest.mark.parametrize(("outer", "inner"), [(0, 4), (1, 1), (7, 1), (40, 3), (5, 16), (3, 35), (4, 0)])
def test_is_topk(isa: None, outer: int, inner: int, k: int) -> None:
    x = torch.randn(outer, 26, inner)
    torch.testing.assert_close(op.call_of(k)(x, k, False), torch.topk(x, k, 1).values, rtol=0, atol=0)
    strided = torch.randn(inner, outer, 52).permute(1, 2, 0)[:, ::2]
    torch.testing.assert_close(op.call_of(k)(strided, k, False), torch.topk(strided, k, 1).values, rtol=0, atol=0)


def test_nan_is_the_largest(isa: None) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-45, -1e-45, 3.0, 3.0, -3.0, -nan])
    x = torch.stack([values[torch.randperm(11)] for _ in range(20)], 1).unsqueeze(0)
    torch.testing.assert_close(
        op.call_of(11)(x, 11, False), torch.topk(x, 11, 1).values, rtol=0, atol=0, equal_nan=True
    )


def in_their_places(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.gather(1, torch.topk(x, k, 1).indices.sort(1).values)


VALUES = {
    "numbers": lambda shape: torch.randn(shape),
    "few": lambda shape: torch.randint(0, 5, shape).float(),
    "zeros": lambda shape: torch.tensor([0.0, -0.0, 1.0])[torch.randint(0, 3, shape)],
    "special": lambda shape: torch.tensor([math.nan, math.inf, -math.inf, 0.0, 2.0])[torch.randint(0, 5, shape)],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (31, 23), (27, 8), (90, 1), (200, 3)])
def test_in_their_places(isa: None, values: str, n: int, k: int) -> None:
    """To the bit: of equal numbers those that torch takes."""
    for outer, inner in ((0, 4), (1, 1), (7, 1), (40, 3), (5, 16), (3, 35)):
        x = VALUES[values]((outer, n, inner))
        found, expected = op.call_of(k, True)(x, k, True), in_their_places(x, k)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_gradients_of_those_in_their_places() -> None:
    x = torch.randint(0, 4, (3, 9, 4)).float().requires_grad_()
    seed = torch.randn(3, 5, 4)
    expected = torch.autograd.grad(in_their_places(x, 5), x, seed)
    torch.testing.assert_close(torch.autograd.grad(op.call_of(5, True)(x, 5, True), x, seed), expected)


def test_declarations_and_gradients() -> None:
    x = torch.randn(3, 5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fxopt.k_largest.default, (x, 2, True))
    seed = torch.randn(3, 2, 4)
    expected = torch.autograd.grad(torch.topk(x, 2, 1).values, x, seed)
    torch.testing.assert_close(torch.autograd.grad(op.call_of(2)(x, 2, False), x, seed), expected)


def test_refuses_what_does_not_fit(isa: None) -> None:
    for x, k in ((torch.randn(3, 5, 4), 6), (torch.randn(3, 5, 4), 0), (torch.randn(3, 5), 2)):
        with pytest.raises(RuntimeError, match="k_largest"):
            torch.ops.fxopt.k_largest(x, k, False)
