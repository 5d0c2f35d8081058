"""Random chains of view operators, valid for every batch size; "B" stands for the batch in their shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import Tensor

Step = Callable[[Tensor], Tensor]
B = "B"


def random_chain(rng: random.Random, length: int, samples: list[Tensor]) -> list[Step]:
    """Steps that all `samples` ([B, 12], of any strides and batch) can take."""
    steps: list[Step] = []
    shape: list[Any] = [B, 12]
    while len(steps) < length:
        made = rng.choice(_MAKERS)(rng, shape)
        if made is None:
            continue
        step, after = made
        try:
            samples = [step(sample) for sample in samples]
        except RuntimeError:  # a view of what is not contiguous
            continue
        steps.append(step)
        shape = after
    return steps


def _unsqueeze(rng: random.Random, shape: list[Any]) -> Any:
    dim = rng.randint(0, len(shape))
    if len(shape) > 4:
        return None
    return (lambda x: x.unsqueeze(dim)), [*shape[:dim], 1, *shape[dim:]]


def _squeeze(rng: random.Random, shape: list[Any]) -> Any:
    ones = [dim for dim, size in enumerate(shape) if size == 1]
    if not ones:
        return None
    dim = rng.choice(ones)
    return (lambda x: x.squeeze(dim)), shape[:dim] + shape[dim + 1 :]


def _transpose(rng: random.Random, shape: list[Any]) -> Any:
    first, second = rng.randrange(len(shape)), rng.randrange(len(shape))
    after = list(shape)
    after[first], after[second] = after[second], after[first]
    if len(shape) == 2 and first != second and rng.random() < 0.5:
        return (lambda x: x.t()), after
    return (lambda x: x.transpose(first, second)), after


def _permute(rng: random.Random, shape: list[Any]) -> Any:
    order = rng.sample(range(len(shape)), len(shape))
    return (lambda x: x.permute(order)), [shape[dim] for dim in order]


def _movedim(rng: random.Random, shape: list[Any]) -> Any:
    source, target = rng.randrange(len(shape)), rng.randrange(len(shape))
    order = list(shape)
    order.insert(target, order.pop(source))
    return (lambda x: x.movedim(source, target)), order


def _flatten(rng: random.Random, shape: list[Any]) -> Any:
    start = rng.randrange(len(shape))
    stop = rng.randrange(start, len(shape))
    merged = shape[start : stop + 1]
    if B in merged:
        return None
    size = 1
    for each in merged:
        size *= each
    return (lambda x: x.flatten(start, stop)), [*shape[:start], size, *shape[stop + 1 :]]


def _cut_axis(rng: random.Random, shape: list[Any]) -> Any:
    dims = [dim for dim, size in enumerate(shape) if size != B and size in (4, 6, 12)]
    if not dims or len(shape) > 4:
        return None
    dim = rng.choice(dims)
    factor = rng.choice([2, shape[dim] // 2])
    pair = [factor, shape[dim] // factor]
    after = [*shape[:dim], *pair, *shape[dim + 1 :]]
    sizes = [-1 if size == B else size for size in after]
    way = rng.randrange(3)
    if way == 0:
        return (lambda x: x.unflatten(dim, pair)), after
    return (lambda x: x.view(sizes) if way == 1 else x.reshape(sizes)), after


def _reshape_back(rng: random.Random, shape: list[Any]) -> Any:
    """[B, everything else], where the batch comes first."""
    if shape[0] != B:
        return None
    size = 1
    for each in shape[1:]:
        size *= each
    if size == 0:
        return None
    method = rng.choice(["view", "reshape"])
    return (lambda x: getattr(x, method)(-1, size)), [B, size]


def _slice(rng: random.Random, shape: list[Any]) -> Any:
    dims = [dim for dim, size in enumerate(shape) if size != B and size > 1]
    if not dims:
        return None
    dim = rng.choice(dims)
    start = rng.randrange(shape[dim])
    stop = rng.randint(start + 1, shape[dim])
    after = [*shape[:dim], stop - start, *shape[dim + 1 :]]
    way = rng.randrange(3)
    if way == 0:
        return (lambda x: x.narrow(dim, start, stop - start)), after
    if way == 1:
        sizes = [start, stop - start, shape[dim] - stop]
        return (lambda x: x.split(sizes, dim)[1]), after
    index = (slice(None),) * dim
    return (lambda x: x[(*index, slice(start, stop))]), after


def _select(rng: random.Random, shape: list[Any]) -> Any:
    dims = [dim for dim, size in enumerate(shape) if size != B]
    if not dims or len(shape) < 2:
        return None
    dim = rng.choice(dims)
    index = rng.randrange(-shape[dim], shape[dim])
    if rng.random() < 0.3:
        return (lambda x: x.unbind(dim)[index]), shape[:dim] + shape[dim + 1 :]
    return (lambda x: x.select(dim, index)), shape[:dim] + shape[dim + 1 :]


def _expand(rng: random.Random, shape: list[Any]) -> Any:
    if len(shape) > 4:
        return None
    after = [rng.choice([1, 3]) if size == 1 else size for size in shape]
    after = [2, *after] if rng.random() < 0.3 else after
    sizes = [-1 if size == B else size for size in after]
    if len(after) > len(shape) and after[0] == B:
        return None
    return (lambda x: x.expand(sizes)), after


def _copy(rng: random.Random, shape: list[Any]) -> Any:
    method = rng.choice(["contiguous", "clone", "contiguous"])
    return (lambda x: getattr(x, method)()), shape


_MAKERS = [
    _unsqueeze, _unsqueeze, _squeeze, _squeeze, _transpose, _transpose, _permute, _movedim, _flatten, _cut_axis,
    _reshape_back, _slice, _select, _expand, _copy,
]  # fmt: skip
