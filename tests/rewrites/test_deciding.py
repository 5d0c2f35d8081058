"""Floats that ids are cut, rounded or searched from keep eager's bits (fxopt/shape/deciding.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from tests.rewrites.test_pointwise import Model, dice, fused, inputs


@pytest.mark.parametrize(
    "integers",
    [
        lambda x: x.sqrt().mul(1e5).long(),
        lambda x: torch.log1p(x).mul(1e6).ceil(),
        lambda x: (torch.log(x) ** 2 * 1e5).int() % 1000,
        lambda x: torch.bucketize(torch.cat([torch.rsqrt(x), x.neg()], 1).t(), torch.linspace(-1, 1, 1_000_000)),
        lambda x: torch.fmod(torch.sigmoid(x / 3000).view(-1) * 1e6, 7),
        lambda x: torch.add(x, x.flip(0), alpha=1 / 3).mul(1e4).round().to(torch.int32),
        lambda x: torch.addcmul(x, x, x.flip(0), value=0.1).div(10).floor_divide(0.01),
    ],
)
def test_integers_are_cut_from_eagers_own_floats(integers: Callable[[Tensor], Tensor]) -> None:
    def both(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return integers(x.abs() * 3000 + 1), dice(m, x, e, lengths)

    model = Model(both)
    fast, names = fused(model)
    assert "fxopt::pointwise" in names
    for _ in range(20):
        given = inputs(300)
        assert torch.equal(fast(*given)[0], model(*given)[0])


class ByRoots(nn.Module):
    """Ids are cut from roots, in a lookup that is fused before what is pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        near_a_whole_root = torch.rsub(torch.where(~(x == 0.0), x, 0.5), 4096**2 + 1)
        return self.table(torch.fmod(near_a_whole_root.sqrt().int(), 8).abs())


@pytest.mark.parametrize("grad", [False, True])
def test_ids_of_lookups_are_cut_from_eagers_own_floats(grad: bool) -> None:
    model = ByRoots()
    with torch.set_grad_enabled(grad):
        fast = optimize(model, (4 * torch.randn(17),), Config(tune="off", verify="off"))
        for x in 4 * torch.randn(20, 17):
            assert torch.equal(fast(x), model(x))
    (findings,) = fast._fxopt.findings
    assert sum(len(ran.changes) for ran in findings.passes if ran.name == "embedding_columns") > 0
