"""A result that is another tensor of the model, or a view of one, has the gradients in others that it has in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.torch_internals.seeds import seed_started

MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weighted sum": lambda m, x: (x * torch.softmax(x @ m.w, 1).unsqueeze(-1)).sum(1),
    "layer": lambda m, x: m.first(x[:, 0]),
    "sum": lambda m, x: x.sum(1),
    "a part": lambda m, x: (x.flatten(1) * 2).narrow(1, 0, 2),
    "a part of a product": lambda m, x: (x.mT @ x)[:, 0],
}
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda v: v.contiguous(),
    "contiguous, viewed": lambda v: v.contiguous().view(v.shape),
    "contiguous, turned": lambda v: v.T.contiguous(),
    "cast": lambda v: v.float(),
    "dropout": lambda v: F.dropout(v, 0.5, False),
    "view": lambda v: v.view(v.shape),
    "all": lambda v: v[:],
    "one piece": lambda v: v.chunk(1, 1)[0],
    "turned twice": lambda v: v.T.T,
    "a view, cast": lambda v: v.view(v.shape).float(),
    "a view, its only piece": lambda v: v.view(v.shape).broadcast_to(v.shape),
    "a view, contiguous": lambda v: v.transpose(0, 0).contiguous(),
    "broadcast alone": lambda v: torch.broadcast_tensors(v, v)[0],
    "of enough dims": lambda v: torch.atleast_2d(v),
    "positive": lambda v: v.positive(),
    "real": lambda v: torch.real(v),
    "plus zero": lambda v: v + 0,
    "copy": lambda v: v.clone(),
}
READ: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "the tensor": lambda m, v, given: m.second(v),
    "the result": lambda m, v, given: torch.sigmoid(given) * 3,
    "both": lambda m, v, given: torch.sigmoid(v).sum() + given.sum(),
}
RETURNED: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "result": lambda v, given, out: (given, out),
    "tensor and result": lambda v, given, out: (v, given, out),
}


class Model(nn.Module):
    """x [B, 2, 2]."""

    def __init__(self, made: str, given: str, read: str, returned: str) -> None:
        super().__init__()
        seed_started(0)
        self.w, self.first, self.second = nn.Parameter(torch.randn(2)), nn.Linear(2, 2), nn.Linear(2, 2)
        self.names = made, given, read, returned

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made, given, read, returned = self.names
        v = MADE[made](self, x)
        result = GIVEN[given](v)
        out = READ[read](self, v, result if result.shape == v.shape else v)
        return RETURNED[returned](v, result, out)


def gradients(model: nn.Module, x: Tensor) -> list[Any]:
    """Of each result in each other, and which are one object."""
    results = model(x)
    pairs = [(a, b) for a in results for b in results if a is not b and a.requires_grad and b.requires_grad]
    found = [torch.autograd.grad(b.sum(), a, retain_graph=True, allow_unused=True)[0] for a, b in pairs]
    return [*found, *(a is b for a in results for b in results)]


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("given", GIVEN)
def test_gradients_between_results_are_eager_s(given: str, asks: bool) -> None:
    """asks: whether the input of the capture requires a gradient, as those of the later calls do."""
    for made in MADE:
        for read in READ:
            for returned in RETURNED:
                model = Model(made, given, read, returned)
                x = torch.randn(2, 2, 2).requires_grad_(asks)
                fast = optimize(model, (x,), Config(verify="off", tune="off"))
                for batch in (2, 3, 1):
                    x = torch.randn(batch, 2, 2).requires_grad_()
                    for found, expected in zip(gradients(fast, x), gradients(model, x), strict=True):
                        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("given", GIVEN)
def test_a_view_of_what_a_result_may_be_is_made_of_that(given: str) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            v = (x * 2).narrow(1, 0, 2)
            view = v.unsqueeze(0).squeeze(0)  # which one operator makes of x * 2, past v
            return GIVEN[given](v), view

    fast = optimize(Both(), config=Config(verify="off", tune="off"))
    for batch in (2, 3, 1):
        x = torch.randn(batch, 4, requires_grad=True)
        for found, expected in zip(gradients(fast, x), gradients(Both(), x), strict=True):
            torch.testing.assert_close(found, expected)


def test_one_of_several_views_stays_one() -> None:
    """An edit of it raises in backward, as it does in eager."""

    class Cut(Model):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.first(x).chunk(2, 1)

    for net in (model := Cut("", "", "", ""), optimize(model, config=Config(tune="off"))):
        (piece,) = net(torch.randn(3, 1, 2))
        piece.detach().mul_(0.5)
        with pytest.raises(RuntimeError, match="multiple views"):
            piece.sum().backward()
