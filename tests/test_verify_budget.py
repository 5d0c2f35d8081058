"""What counts as rounding where products are made in TF32, and what is compared in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fxopt.capture import capture
from fxopt.kernels.mlp.cuda.ways import is_long
from fxopt.tune import tuner
from fxopt.verify.budget import Reference, largest_difference, rounding_of, within_budget


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("device", "dtype", "matmul", "conv", "shape", "wide"),
    [
        ("cuda", torch.float32, True, False, (2, 3), True),
        ("cuda", torch.float32, False, True, (2, 3), False),  # no convolution
        ("cuda", torch.float32, False, True, (2, 3, 1), True),
        ("cuda", torch.bfloat16, True, True, (2, 3, 1), False),
        ("cpu", torch.float32, True, True, (2, 3, 1), False),
    ],
)
def test_tf32_counts_where_products_are_made_in_it(device, dtype, matmul, conv, shape, wide):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv
    layer = nn.Conv1d(3, 4, 1) if len(shape) == 3 else nn.Linear(3, 4)
    graph = capture(layer, (torch.randn(*shape),), {}).graph.graph
    with FakeTensorMode():
        eager = torch.empty(3, dtype=dtype, device=device)
    assert (rounding_of(eager, graph) > torch.finfo(dtype).eps) == wide


@pytest.mark.parametrize(("precision", "wide"), [("tf32", True), ("ieee", False)])
def test_the_newer_name_of_tf32_counts_too(precision, wide):
    """Once it was set torch raises where it is asked by the older one."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        graph = capture(nn.Linear(3, 4), (torch.randn(2, 3),), {}).graph.graph
        with FakeTensorMode():
            eager = torch.empty(3, device="cuda")
        assert (rounding_of(eager, graph) > torch.finfo(torch.float32).eps) == wide
        assert is_long(torch.float32, 4, 128, 1024) == wide
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("at", [None, 0, 6, 20])
@pytest.mark.parametrize("wrong", [1.0, torch.inf, torch.nan])
def test_a_large_tensor_is_compared_in_pieces(monkeypatch, at, wrong):
    eager = torch.randn(3, 7)
    ours = eager.clone()
    if at is not None:
        ours.view(-1)[at] += wrong
    exact = Reference(eager.double(), lambda: eager.double())
    expected = within_budget(eager, ours, lambda: exact), largest_difference(eager, ours)
    monkeypatch.setattr(tuner, "_PIECE", 4)
    assert (within_budget(eager, ours, lambda: exact), largest_difference(eager, ours)) == expected
    assert bool(expected[0]) == (at is not None)
