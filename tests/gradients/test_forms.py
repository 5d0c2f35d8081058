"""What a caller sees of an output besides its values: strides and shared memory, and empty axes in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import optimize
from tests.gradients.test_bounds import OFF, gradients

Parts = dict[str, Callable[[Tensor, Tensor], Any]]

OUTPUTS: Parts = {
    "outer": lambda x, w: x.unsqueeze(2) @ x.unsqueeze(1),
    "outer, transposed": lambda x, w: (x.unsqueeze(2) @ x.unsqueeze(1)).transpose(1, 2),
    "bmm of one": lambda x, w: torch.bmm(x.unsqueeze(2), x.unsqueeze(1)),
    "mm of one": lambda x, w: x[:, :1] @ w[:1],
    "mm of one, transposed": lambda x, w: w[:, :1] @ x.t()[:1],
    "einsum outer": lambda x, w: torch.einsum("bi,bj->bij", x, x),
    "einsum outer, permuted": lambda x, w: torch.einsum("bi,bj->jib", x, x),
    "einsum product": lambda x, w: torch.einsum("ib,ib->ib", x.t(), x.t()),
    "einsum product, permuted": lambda x, w: torch.einsum("ib,ib->bi", x.t(), x.t()),
    "einsum mixed": lambda x, w: torch.einsum("ib,bi->bi", x.t(), x),
    "einsum diagonal": lambda x, w: torch.einsum("bi,i->bi", x, w[0]),
    "einsum alone": lambda x, w: torch.einsum("bi->ib", x),
    "linear, transposed": lambda x, w: F.linear(x, w).t(),
    "matrix from the left": lambda x, w: w @ x.t(),
    "times one": lambda x, w: (x * 1, x * 1),
    "plus zero": lambda x, w: x.t() + 0,
    "twice the same": lambda x, w: (x * 2, x * 2),
    "a product and its view": lambda x, w: (lambda y: (y, y.t()))(x * 2),
    "the input itself": lambda x, w: (x, x),
    "there and back": lambda x, w: x.t().contiguous().t(),
    "pointwise, transposed": lambda x, w: ((x.t() * 2 + 1).sigmoid() * 3 - 1).t(),
    "cat of one": lambda x, w: torch.cat([x], 1),
    "stack of what was unbound": lambda x, w: torch.stack(x.unbind(1), 0),
    "a parameter": lambda x, w: (w.t(), w * 1),
    "halves": lambda x, w: (lambda y: (y[:, :2], y[:, 2:]))(x * 3),
    "dropout": lambda x, w: F.dropout(x.t(), 0.5, False),
}


class Returns(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def seen(model: Returns, x: Tensor) -> list[tuple]:
    """Of each output: shape, strides where they count, contiguity, and whose memory it is."""
    result = model(x)
    outputs = result if isinstance(result, tuple) else (result,)
    tensors = [x, model.weight, *outputs]
    strides = [tuple(s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1 and y.numel()) for y in outputs]
    shared = [[_memory(y) is not None and _memory(y) == _memory(t) for t in tensors] for y in outputs]
    same = [[y is t for t in tensors] for y in outputs]
    return [
        (y.shape, *rest)
        for y, *rest in zip(outputs, strides, map(Tensor.is_contiguous, outputs), shared, same, strict=True)
    ]


def _memory(x: Tensor) -> int | None:
    return x.untyped_storage().data_ptr() if x.numel() else None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_strides_and_shared_memory(name: str, grad: bool) -> None:
    model = Returns(OUTPUTS[name])
    fast: Any = optimize(copy.deepcopy(model), config=OFF)
    inputs = [
        *(torch.randn(5, 4), torch.randn(4, 5).t(), torch.randn(1, 4), torch.randn(0, 4), torch.randn(3, 8)[:, ::2]),
        *(torch.randn(1, 4).expand(3, 4), torch.randn(3, 1).expand(3, 4), torch.randn(3, 9)[:, 3:7]),
    ]
    with torch.set_grad_enabled(grad):
        for x in inputs:
            assert seen(fast, x) == seen(model, x)


def columns(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


EMPTY: Parts = {
    "softmax": lambda x, w: columns((x * 2 + w).softmax(1) * x),
    "log_softmax": lambda x, w: columns((x * 2 + w).log_softmax(1) * x),
    "softmax of two axes": lambda x, w: columns((x * w + 1).flatten(1).softmax(-1) * 2 + 1),
    "masked softmax": lambda x, w: columns((x * w).masked_fill(x > 0, -1e9).softmax(1) * x).sum(1),
    "softmax and sum": lambda x, w: columns(((x * w + 1).softmax(1) * x).sum(1)),
    "mean": lambda x, w: columns((x * w + 1).mean(1) * 2 + 1),
    "sum": lambda x, w: columns((x * w + 1).sum(1) * 2 + 1),
    "amax": lambda x, w: columns((x * w + 1).amax(1) * 2 + 1),
    "layer_norm": lambda x, w: columns(F.layer_norm(x * w + 1, (3,)) * x + w),
    "normalize": lambda x, w: columns(F.normalize(x * w + 1, dim=1) * 2),
    "attention": lambda x, w: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "layers": lambda x, w: F.linear(F.relu6(F.linear(x, w.expand(4, 3))), w.expand(4, 3).t()),
    "dots": lambda x, w: torch.einsum("bld,bmd->blm", x, x * w),
}


class Rows(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(3)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def outcome(model: nn.Module, x: Tensor) -> Any:
    try:
        return gradients(model, x)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", EMPTY)
def test_empty_axes_in_backward(name: str) -> None:
    model = Rows(EMPTY[name])
    fast = optimize(copy.deepcopy(model), config=OFF)
    for shape in ((4, 5, 3), (4, 0, 3), (0, 5, 3), (0, 0, 3), (1, 1, 3)):
        x = torch.randn(shape)
        expected, found = outcome(model, x), outcome(fast, x)
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected))
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


class Longest(nn.Module):
    """A maximum over ids beside their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.table(ids).sum(1), self.table(ids).max(1)[0]], -1)


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_a_maximum_over_no_ids_raises(rows: int) -> None:
    fast = optimize(Longest(), config=OFF)
    with torch.no_grad():
        fast(torch.randint(0, 7, (4, 5)))
        with pytest.raises(IndexError, match="non-zero size"):
            fast(torch.randint(0, 7, (rows, 0)))
