"""Arbitrary floats: the error against fp64 tables is at most twice eager's own, plus rounding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt.config import Config
from fxopt.optimize import optimize
from tests.properties.graphs import programs
from tests.properties.inputs import Sizes
from tests.properties.programs import Program

MODELS = 150
SIZES = Sizes(40, 30)  # long enough for sums whose order matters


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """`model` with tables from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def called(model: nn.Module, arguments: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The flat outputs without gradients; None where the model raises."""
    try:
        with torch.no_grad():
            return pytree.tree_leaves(model(*arguments))
    except Exception:
        return None


def check(program: Program, seen: Counter[str]) -> None:
    eager, arguments = drawn(program.model(), 1), program.arguments(SIZES, 0)
    with torch.no_grad():
        exact = drawn(program.model(), 1).double()
        for parameter, narrow in zip(exact.parameters(), eager.parameters(), strict=True):
            parameter.copy_(narrow)
    expected, reference = called(eager, arguments), called(exact, arguments)
    if expected is None or reference is None:  # an id outside its table, or an operator that wants one dtype
        return
    with torch.no_grad():
        fast = optimize(drawn(program.model(), 1), program.arguments(program.sizes, 0), Config(verify="off"))
    found = called(fast, arguments)
    assert found is not None
    for own, ours, true in zip(expected, found, reference, strict=True):
        finite = own.isfinite() & true.isfinite()
        assert torch.equal(own.isnan(), ours.isnan()) and torch.equal(own.isinf(), ours.isinf())
        if not finite.any():
            continue
        own, ours, true = (t[finite].double() for t in (own, ours, true))
        rounding = 4 * torch.finfo(expected[0].dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (own - true).abs().max() + rounding
        seen["compared"] += 1


@pytest.mark.slow
def test_random_floats() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=MODELS, derandomize=True)
    @given(programs())
    def run(program: Program) -> None:
        check(program, seen)

    run()
    assert seen["compared"] > MODELS // 2, seen
