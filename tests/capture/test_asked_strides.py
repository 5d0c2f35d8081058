"""Code that asks how a tensor lies gets eager's answer at every size, those of 1 and 0 among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize

Made = Callable[[Tensor, Tensor], Tensor]
MADE: dict[str, Made] = {
    "products over one size": lambda x, y: torch.einsum("abc,abc->ba", x, x),
    "a product in batches": lambda x, y: torch.einsum("abc,abd->dca", x, y),
    "a product of three": lambda x, y: torch.einsum("abc,bc,ac->ba", x, x[0], y[:, 0]),
    "a turned product": lambda x, y: (x.mT @ y).mT,
    "a product with a vector": lambda x, y: x.mT @ x[0, :, 0],
    "one hot": lambda x, y: F.one_hot((x.mT > 0).long(), 2).float(),
    "turned": lambda x, y: x.transpose(0, 1),
    "a part": lambda x, y: x[:, 1:],
    "a part, computed": lambda x, y: x[:, :1].exp(),
    "computed turned": lambda x, y: x.mT.exp() * y.mT,
    "broadcast": lambda x, y: x.mT * y[:, :1].mT,
    "gates": lambda x, y: F.glu(torch.cat([x, y], 1).mT, 2),
    "copied and turned": lambda x, y: x.mT.contiguous().transpose(0, 1),
    "a turned reshape": lambda x, y: x.mT.reshape(x.shape),
    "sums": lambda x, y: x.transpose(0, 2).sum(1),
    "largest": lambda x, y: x.mT.amax(0),
    "a softmax": lambda x, y: x.mT.softmax(1),
    "joined": lambda x, y: torch.cat([x.mT, y.mT], 1),
    "like another": lambda x, y: torch.ones_like(x.mT) * x.mT,
    "expanded": lambda x, y: x[:, :1].expand(-1, 3, -1),
    "a layer": lambda x, y: F.linear(x, y[0]).mT,
    "chosen": lambda x, y: torch.where(x.mT > 0, y.mT, 0.0),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]).transpose(1, 2),
}
ASKED: dict[str, Callable[[Tensor], bool]] = {
    "is_contiguous": lambda made: made.is_contiguous(),
    "the last stride": lambda made: made.stride(-1) == 1,
    "two strides": lambda made: made.stride(0) >= made.stride(-1),
}
SIZES = [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 5), (3, 1, 1), (1, 4, 1), (1, 1, 1), (2, 2, 2), (0, 4, 5)]
GIVEN: dict[str, Callable[[], Tensor]] = {  # the dims of size 1 and the empty ones of these have other strides
    "contiguous": lambda: torch.randn(4, 3),
    "turned": lambda: torch.randn(3, 4).T,
    "the first columns": lambda: torch.randn(4, 6)[:, :3],
    "one row": lambda: torch.randn(1, 3),
    "one row of columns": lambda: torch.randn(1, 6)[:, 1:4],
    "one column": lambda: torch.randn(4, 1),
    "one of two columns": lambda: torch.randn(4, 2)[:, :1],
    "empty": lambda: torch.randn(0, 3),
    "a sum of none": lambda: torch.randn(0, 1) + 1,
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
}
ASKED_OF_INPUTS: dict[str, Callable[[Tensor], bool]] = {
    **ASKED,
    "the first stride": lambda x: x.stride(0) == 1,
    "the largest stride": lambda x: max(x.stride()) > x.shape[-1],
    "the order of dims": lambda x: x.dim_order() == (0, 1),
    "a turned one": lambda x: x.T.is_contiguous(),
    "channels": lambda x: x[None, None].is_contiguous(memory_format=torch.channels_last),
    "a view": lambda x: x._is_view(),
    "a storage": lambda x: x.storage().size() > 12,
}


class Asks(nn.Module):
    def __init__(self, make: Made, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.make, self.ask = make, ask

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.make(x, y)
        return made if self.ask(made) else made * 2


def outcome(model: nn.Module, *given: Tensor) -> Tensor | str:
    try:
        return model(*given)
    except Exception as error:
        return type(error).__name__


@torch.no_grad()
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("made", MADE)
def test_answers_are_eager_s(made: str, asked: str) -> None:
    model = Asks(MADE[made], ASKED[asked])
    fast = optimize(model, (torch.randn(1, 1, 1), torch.randn(1, 1, 1)), Config(verify="off", tune="off"))
    for sizes in SIZES:
        given = torch.randn(sizes), torch.randn(sizes)
        expected, found = outcome(model, *given), outcome(fast, *given)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("asked", ASKED_OF_INPUTS)
@pytest.mark.parametrize("captured", GIVEN)
def test_answers_about_inputs_are_eager_s(captured: str, asked: str) -> None:
    model = Asks(lambda x, y: x, ASKED_OF_INPUTS[asked])
    first = GIVEN[captured]()
    fast = optimize(model, (first, first), Config(verify="off", tune="off"))
    for made in GIVEN.values():
        given = made()
        torch.testing.assert_close(fast(given, given), model(given, given))
