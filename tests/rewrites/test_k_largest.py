"""The k largest in their places: topk, its indices sorted, and a gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from tests.rewrites.products import Largest

Lists = Callable[[Tensor], object]


class Placed(Largest):
    def __init__(self, pooled: Lists) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, x: Tensor) -> object:
        return self.pooled(torch.tanh(x.unsqueeze(2) * self.scale))


def read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.topk(x, 2, dim=1)[1].sort(dim=1)[0]
    return x.gather(1, places), places


FIRES: dict[str, Lists] = {
    "FuxiCTR": lambda x: x.gather(1, x.topk(2, dim=1)[1].sort(dim=1)[0]),
    "from behind": lambda x: torch.gather(x, -2, torch.sort(torch.topk(x, 2, -2, sorted=False).indices, -2).values),
    "the last dim": lambda x: x.gather(2, x.topk(4)[1].sort()[0]),
}
STAYS: dict[str, Lists] = {
    "of another tensor": lambda x: (x * 2).gather(1, x.topk(2, dim=1)[1].sort(dim=1)[0]),
    "unsorted": lambda x: x.gather(1, x.topk(2, dim=1)[1]),
    "from the last to the first": lambda x: x.gather(1, x.topk(2, dim=1)[1].sort(dim=1, descending=True)[0]),
    "sorted along another dim": lambda x: x.gather(1, x.topk(2, dim=1)[1].sort(dim=2)[0]),
    "gathered along another dim": lambda x: x.gather(2, x.topk(2, dim=1)[1].sort(dim=1)[0]),
    "the least": lambda x: x.gather(1, x.topk(2, dim=1, largest=False)[1].sort(dim=1)[0]),
    "places are read": read_twice,
}


def optimized(model: nn.Module) -> tuple[nn.Module, list[str]]:
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason and not any(ran.rolled_back for ran in found.passes)
    return fast, [change.what for ran in found.passes if ran.name == "k_largest" for change in ran.changes]


@pytest.mark.parametrize("name", FIRES)
def test_fires(name: str) -> None:
    model = Placed(FIRES[name])
    fast, changes = optimized(model)
    assert len(changes) == 1 and changes[0].endswith("in their places")
    for batch in (0, 1, 2, 7):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-6, atol=1e-6)
        expected, found = (torch.autograd.grad(net(x).square().sum(), list(net.parameters())) for net in (model, fast))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    model = Placed(STAYS[name])
    fast, changes = optimized(model)
    assert not changes
    x = torch.randn(5, 3)
    torch.testing.assert_close(fast(x), model(x))
