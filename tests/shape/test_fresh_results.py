"""Results of torch's operators that Strides takes for contiguous are so, however the arguments lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fxopt.shape.strides import _FRESH

aten = torch.ops.aten
SHAPES = [(3, 4, 5), (2, 6), (2, 3, 4, 5), (1, 4, 3), (4, 1, 1)]
MADE: dict[object, Callable[[Tensor, Tensor, int], object]] = {
    aten.repeat_interleave.self_int: lambda x, at, d: [aten.repeat_interleave.self_int(x, n, d) for n in (0, 1, 3)],
    aten.repeat_interleave.self_Tensor: lambda x, at, d: aten.repeat_interleave.self_Tensor(
        x, torch.full((x.shape[d],), 2, device=x.device), d
    ),
    aten.index_select.default: lambda x, at, d: aten.index_select.default(x, d, at.flatten()[:3]),
    aten.gather.default: lambda x, at, d: aten.gather.default(x, d, at),
    aten.tril.default: lambda x, at, d: aten.tril.default(x),
    aten.triu.default: lambda x, at, d: aten.triu.default(x),
    aten.scatter.value: lambda x, at, d: aten.scatter.value(x, d, at, 1.0),
    aten.scatter.src: lambda x, at, d: aten.scatter.src(x, d, at, x),
    aten.scatter_add.default: lambda x, at, d: aten.scatter_add.default(x, d, at, x),
    aten.masked_select.default: lambda x, at, d: aten.masked_select.default(x, x > 0),
    aten.topk.default: lambda x, at, d: aten.topk.default(x, (x.shape[d] + 1) // 2, d),
    aten.max.dim: lambda x, at, d: aten.max.dim(x, d),
    aten.min.dim: lambda x, at, d: aten.min.dim(x, d, True),
    aten.argmax.default: lambda x, at, d: aten.argmax.default(x, d),
    aten.argmin.default: lambda x, at, d: aten.argmin.default(x, d, True),
    aten.cumsum.default: lambda x, at, d: aten.cumsum.default(x, d),
    aten.repeat.default: lambda x, at, d: aten.repeat.default(x, [1] * x.dim()),
    aten.softmax.int: lambda x, at, d: aten.softmax.int(x, d),
    aten.log_softmax.int: lambda x, at, d: aten.log_softmax.int(x, d),
    aten.layer_norm.default: lambda x, at, d: aten.layer_norm.default(x, x.shape[d:]),
}


def layouts(shape: tuple[int, ...], device: str) -> Iterator[Tensor]:
    """Tensors of this shape: with axes in every order, with gaps, and with an axis of stride 0."""
    axes = range(len(shape))
    for order in itertools.permutations(axes):
        x = torch.randn([shape[axis] for axis in order], device=device)
        yield x.permute([order.index(axis) for axis in axes])
    yield torch.randn([2 * size for size in shape], device=device)[(slice(None, None, 2),) * len(shape)]
    for axis in axes:
        yield torch.randn([1 if axis == other else shape[other] for other in axes], device=device).expand(shape)


def check(target: object, device: str) -> None:
    for shape in SHAPES:
        for x in layouts(shape, device):
            for dim in range(len(shape)):
                places = torch.randint(shape[dim], shape, device=device)
                for at in (places, places.mT.contiguous().mT):
                    results = MADE[target](x, at, dim)
                    for result in results if isinstance(results, tuple | list) else [results]:
                        assert result.is_contiguous(), (shape, x.stride(), dim)


@pytest.mark.parametrize("target", MADE, ids=str)
def test_results_are_contiguous(target: object) -> None:
    assert target in _FRESH
    check(target, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("target", MADE, ids=str)
def test_results_are_contiguous_on_a_gpu(target: object) -> None:
    check(target, "cuda")
