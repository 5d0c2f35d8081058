"""Interaction kernels against their definitions in PyTorch, under every instruction set, forward and backward."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxopt.kernels.build import find
from fxopt.kernels.interactions import attention, dot, library, pair_sum

SIZES = [(2, 1), (5, 4), (17, 10), (27, 16), (33, 7)]  # vectors, their size
BATCHES = [0, 1, 7]


@pytest.fixture(params=["avx512", "avx2", "scalar"], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """The best that this CPU has up to the named one."""
    dot.OPERATORS.compiled()
    path = find(library.KERNEL)
    if path is None:
        pytest.skip("no compiled kernel here")
    choose = ctypes.CDLL(str(path)).fxopt_interactions_isa
    choose(request.param.encode())
    yield
    choose(None)


def agree(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if found.requires_grad:
        grad = torch.randn_like(expected)
        ours, theirs = (torch.autograd.grad(y, inputs, grad) for y in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def pairs_of(F: int, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "any":
        return torch.randint(-F, F, (40,)), torch.randint(-F, F, (40,))
    if kind == "none":
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    grid = torch.ones(F, F)
    half = {"tril": grid.tril(-1), "tril, diagonal": grid.tril(), "triu": grid.triu(1), "all": grid}[kind]
    i, j = half.nonzero().unbind(1)
    return i, j


@pytest.mark.parametrize("kind", ["tril", "tril, diagonal", "triu", "all", "any", "none"])
@pytest.mark.parametrize("split", [1, 3])
def test_dot_interaction(kind: str, split: int) -> None:
    for B, (F, D) in itertools.product(BATCHES, SIZES):
        i, j = pairs_of(F, kind)
        parts = [torch.randn(B, D)] if split > 1 and F > 2 else []
        parts.append(torch.randn(D, B, F - len(parts)).permute(1, 2, 0) if split > 1 else torch.randn(B, F, D))
        before, after = [torch.randn(B, 3)], [torch.randn(2, B).t(), torch.randn(B, 1)]
        inputs = [x.requires_grad_() for x in (*parts, *before, *after)]
        call = dot.OPERATORS.call_of("dot_interaction")
        expected = dot.dot_interaction(parts, before, after, i, j)
        agree(call(parts, before, after, i, j), expected, inputs)
        with torch.no_grad():
            agree(call(parts, before, after, i, j), expected.detach(), [])


def test_an_index_outside_of_the_vectors_is_refused() -> None:
    x = torch.randn(3, 4, 5)
    with pytest.raises(RuntimeError, match="index 4 is out of bounds for 4 vectors"):
        dot.OPERATORS.call_of("dot_interaction")([x], [], [], torch.tensor([0, 4]), torch.tensor([1, 2]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("total", [False, True])
def test_pair_sum(weighted: bool, total: bool) -> None:
    for B, (F, D), strided in itertools.product(BATCHES, SIZES, (False, True)):
        x = torch.randn(D, B, F).permute(1, 2, 0) if strided else torch.randn(B, F, D)
        shape = (F, B) if strided else (B, F, 1)
        weights = (torch.randn(shape).t() if strided else torch.randn(shape)) if weighted else None
        inputs = [tensor.requires_grad_() for tensor in (x, weights) if tensor is not None]
        call = pair_sum.call_of(0.7, total)
        agree(call(x, weights, 0.7, total), pair_sum.pair_sum(x, weights, 0.7, total), inputs)


def test_pair_sum_of_large_values_that_cancel() -> None:
    """(sum x)^2 - sum x^2 in floats is off by 1e-3 here."""
    x = 1000 + torch.randn(4, 30, 8)
    exact = pair_sum.pair_sum(x.double(), None, 1.0, False)
    found = pair_sum.call_of(1.0, False)(x, None, 1.0, False)
    assert ((found - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_pair_attention(biased: bool) -> None:
    for B, (F, D), A in itertools.product(BATCHES, SIZES[1:], (1, 8, 20)):
        i, j = pairs_of(F, "triu" if A > 1 else "any")
        x, weight, query = torch.randn(B, F, D), torch.randn(D, A).t() * 0.3, torch.randn(1, A) * 0.3
        bias, query_bias = (torch.randn(A), torch.randn(1)) if biased else (None, None)
        inputs = [t.requires_grad_() for t in (x, weight, bias, query) if t is not None]
        arguments = (x, i, j, weight, bias, query, query_bias)
        call = attention.OPERATORS.call_of("pair_attention")
        for found, expected in zip(call(*arguments), attention.pair_attention(*arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        found, expected = (f(*arguments) for f in (call, attention.pair_attention))
        agree(torch.cat(list(found), 1), torch.cat(list(expected), 1), inputs)


@pytest.mark.parametrize("isa", ["avx512"], indirect=True)
def test_operators_follow_torchs_rules() -> None:
    x, w, beside = torch.randn(3, 4, 5), torch.randn(3, 4), torch.randn(3, 2)
    i, j = pairs_of(4, "tril")
    leaves = [tensor.requires_grad_() for tensor in (x, w, beside)]
    hidden, query = torch.randn(6, 5, requires_grad=True), torch.randn(1, 6)
    for operator, arguments in (
        (torch.ops.fxopt.dot_interaction.default, ([leaves[0]], [leaves[2]], [], i, j)),
        (torch.ops.fxopt.pair_sum.default, (leaves[0], leaves[1], 0.5, False)),
        (torch.ops.fxopt.pair_sum.default, (leaves[0], None, 0.5, True)),
        (torch.ops.fxopt.pair_attention.default, (leaves[0], i, j, hidden, None, query, None)),
    ):
        torch.library.opcheck(
            operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )


def test_second_derivatives() -> None:
    x, w = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    i, j = pairs_of(4, "tril, diagonal")
    hidden, query = torch.randn(6, 5, requires_grad=True), torch.randn(1, 6)

    def second(y: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    dots = dot.OPERATORS.call_of("dot_interaction")
    attended = attention.OPERATORS.call_of("pair_attention")
    pairs = [
        (dots([x], [], [], i, j), dot.dot_interaction([x], [], [], i, j)),
        (pair_sum.call_of(0.5, False)(x, w, 0.5, False), pair_sum.pair_sum(x, w, 0.5, False)),
        (attended(x, i, j, hidden, None, query, None)[0],
         attention.pair_attention(x, i, j, hidden, None, query, None)[0]),
    ]  # fmt: skip
    for found, expected in pairs:
        torch.testing.assert_close(second(found), second(expected), rtol=1e-3, atol=1e-3)
