"""Functions called by keywords alone, `torch.index_select(input=x, dim=1, index=at)`, are captured as others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of x [B, 3, 4] and w [2, 3, 2]
    "split": lambda x, w: torch.cat(tensors=torch.split(tensor=x, split_size_or_sections=1, dim=1)[1:], dim=1),
    "split of sizes": lambda x, w: torch.split(tensor=x, split_size_or_sections=[1, 2], dim=1)[1],
    "chunk": lambda x, w: torch.chunk(input=x, chunks=3, dim=1)[1],
    "unbind": lambda x, w: torch.unbind(input=x, dim=1)[2],
    "tensor_split": lambda x, w: torch.tensor_split(input=x, sections=3, dim=1)[0],
    "select": lambda x, w: torch.select(input=x, dim=1, index=1),
    "the last": lambda x, w: torch.select(input=x, dim=1, index=-1),
    "narrow": lambda x, w: torch.narrow(input=x, dim=1, start=1, length=2),
    "index_select": lambda x, w: torch.index_select(input=x, dim=1, index=torch.tensor(data=[2, 0])),
    "as a method": lambda x, w: x.index_select(dim=2, index=torch.tensor(data=[1, 0])),
    "convolution": lambda x, w: torch.conv1d(input=x, weight=w),
    "gather": lambda x, w: torch.gather(input=x, dim=1, index=torch.zeros_like(x, dtype=torch.int64)),
    "einsum": lambda x, w: torch.einsum("bfe,ofe->bo", x[:, :, :2], w),
    "attention": lambda x, w: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "softmax": lambda x, w: torch.softmax(input=torch.matmul(input=x, other=x.mT), dim=-1),
    "where": lambda x, w: torch.where(condition=torch.gt(input=x, other=0), input=x, other=torch.zeros_like(input=x)),
    "layer norm": lambda x, w: F.layer_norm(input=x, normalized_shape=(4,)),
    "assert": lambda x, w: (torch._assert(condition=x.shape[1] == 3, message="fields"), x.exp())[1],
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_by_keywords(call: Callable[[Tensor, Tensor], Tensor], gradients: bool) -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return call(x, self.w) * 2

    model = Calling()
    with torch.set_grad_enabled(gradients):
        fast = optimize(model, (torch.randn(5, 3, 4),), Config(tune="off"))
        (findings,) = fast._fxopt.findings
        assert not findings.eager_reason and not findings.leaves
        for rows in (5, 1, 0, 7):
            x = torch.randn(rows, 3, 4)
            torch.testing.assert_close(fast(x), model(x))
    assert len(fast._fxopt.findings) == 1
