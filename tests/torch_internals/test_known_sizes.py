"""Random views, joins, lookups, products and elementwise operators: the short ways give torch's own fake results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config

from fxopt.capture.inputs import FakeInputs, flatten
from fxopt.torch_internals import elementwise

aten = torch.ops.aten
CASES = 100
DTYPES = (torch.float32, torch.float32, torch.float32, torch.int64, torch.bfloat16)


class Maker:
    """Tensors whose sizes are products of the sizes of an input [B, L] and of numbers, as chance wants them."""

    def __init__(self, given: Tensor, seed: int) -> None:
        self.chance = random.Random(seed)
        self.given = given
        rows, length = given.shape
        self.sizes: list[Any] = [rows, length, 1, 3, 8, rows * length, rows * 3, length + 1]
        self.dtype = self.chance.choice(DTYPES)

    def shape(self, rank: int) -> list[Any]:
        return [self.chance.choice(self.sizes[:5] if rank > 1 else self.sizes) for _ in range(rank)]

    def tensor(self, shape: list[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Fresh, or a part of something wider, a transposed one, or one that repeats a row."""
        dtype, form = dtype or self.dtype, self.chance.random()
        if form < 0.7 or not shape:
            return self.given.new_empty(shape, dtype=dtype)
        if form < 0.8 and isinstance(shape[-1], int):
            return self.given.new_empty([*shape[:-1], shape[-1] + 4], dtype=dtype)[..., 2 : 2 + shape[-1]]
        if form < 0.9:
            return self.given.new_empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
        return self.given.new_empty([1, *shape[1:]], dtype=dtype).expand(shape)

    def view(self) -> Tensor:
        shape = self.shape(self.chance.randint(1, 3))
        x, new = self.tensor(shape), list(shape)
        self.chance.shuffle(new)
        if len(new) > 1 and self.chance.random() < 0.5:
            new[:2] = [new[0] * new[1]]
        if self.chance.random() < 0.3:
            new[self.chance.randrange(len(new))] = -1
        if self.chance.random() < 0.3:
            new.insert(self.chance.randint(0, len(new)), 1)
        return aten.view.default(x, new)

    def heads(self) -> Tensor:
        shape = [*self.shape(self.chance.randint(0, 2)), self.chance.choice((8, 8, 8, 3))]
        wide = self.given.new_empty([*shape[:-1], 24], dtype=self.dtype)
        x = wide[..., 8 : 8 + shape[-1]] if self.chance.random() < 0.8 else self.tensor(shape)
        return aten.view.default(x, [*shape[:-1], *self.chance.choice(([2, 4], [4, 2, 1], [8], [2, -1], [1, 3]))])

    def part(self) -> Tensor:
        x = self.tensor(self.shape(self.chance.randint(1, 4)))
        dim = self.chance.randint(-x.ndim, x.ndim - 1)
        if self.chance.random() < 0.5:
            return aten.select.int(x, dim, self.chance.randint(-3, 3))
        ends = [0, None, 1, -1, 2, 5, -2, 9223372036854775807]
        rest = [*(self.chance.choice(ends) for _ in range(2)), self.chance.choice((1, 1, 1, 2))]
        return aten.slice.Tensor(x, dim, *rest[: self.chance.randint(0, 3)])

    def same(self) -> Tensor:
        """All of a tensor, or with one dim more."""
        x = self.tensor(self.shape(self.chance.randint(0, 4)))
        if self.chance.random() < 0.3:
            return aten.detach.default(x)
        return aten.unsqueeze.default(x, self.chance.randint(-x.ndim - 2, x.ndim + 1))

    def cat(self) -> Tensor:
        rank = self.chance.randint(1, 4)
        shape, dim = self.shape(rank), self.chance.randrange(-rank, rank)
        parts = []
        for _ in range(self.chance.randint(1, 4)):
            part = list(shape)
            part[dim] = self.chance.choice(self.sizes)
            parts.append(self.tensor(part, self.chance.choice([self.dtype] * 8 + [torch.float64])))
        return aten.cat.default(parts, dim)

    def embedding(self) -> Tensor:
        weight = self.tensor(self.shape(2))
        ids = self.chance.choice((torch.int64, torch.int32, torch.int16))
        return aten.embedding.default(weight, self.tensor(self.shape(self.chance.randint(0, 3)), ids))

    def index(self) -> Tensor:
        shape = self.shape(self.chance.randint(1, 3))
        kinds = (torch.int64, torch.int64, torch.int32, torch.bool)
        rows = [self.tensor(self.shape(self.chance.randint(1, 2)), self.chance.choice(kinds))]
        more = [None, self.tensor(list(rows[0].shape), torch.int64)][: self.chance.choice((0, 0, 0, 1, 2))]
        return aten.index.Tensor(self.tensor(shape), [*more, *rows] if self.chance.random() < 0.5 else [*rows, *more])

    def stack(self) -> Tensor:
        shape = self.shape(self.chance.randint(0, 4))
        parts = [self.tensor(shape, self.chance.choice([self.dtype] * 8 + [torch.float64]))]
        while self.chance.random() < 0.6:
            parts.append(self.tensor(shape if self.chance.random() < 0.9 else shape[::-1]))
        return aten.stack.default(parts, self.chance.randint(-len(shape) - 1, len(shape)))

    def clone(self) -> Tensor:
        formats = [{}, {"memory_format": torch.contiguous_format}, {"memory_format": torch.preserve_format}]
        return aten.clone.default(self.tensor(self.shape(self.chance.randint(0, 5))), **self.chance.choice(formats))

    def sum(self) -> Tensor:
        x = self.tensor(self.shape(self.chance.randint(0, 5)), self.chance.choice((self.dtype, torch.bool)))
        if self.chance.random() < 0.2:
            return aten.all.default(x if self.chance.random() < 0.5 else self.tensor([3, 8], torch.uint8))
        dims = [self.chance.randint(-3, 3) for _ in range(self.chance.randint(0, 3))]
        operator = self.chance.choice((aten.sum.dim_IntList, aten.mean.dim))
        return operator(x, dims, *[self.chance.random() < 0.5][: self.chance.randint(0, 1)])

    def constructed(self) -> Tensor:
        shape = self.shape(self.chance.randint(0, 4))
        given = {"dtype": self.dtype, "device": "cpu", "layout": torch.strided, "pin_memory": False}
        chosen = {name: value for name, value in given.items() if self.chance.random() < 0.5}
        if self.chance.random() < 0.5:
            return aten.empty.memory_format(shape, **chosen)
        return aten.empty_strided.default(shape, [self.chance.choice(self.sizes) for _ in shape], **chosen)

    def turned(self) -> Tensor:
        x = self.tensor(self.shape(self.chance.randint(0, 4)))
        one, other = (self.chance.randint(-x.ndim - 1, x.ndim) for _ in range(2))
        if self.chance.random() < 0.3:
            return aten.t.default(x)
        if self.chance.random() < 0.6:
            return aten.transpose.int(x, one, other)
        dims = [self.chance.choice((dim, dim, dim - x.ndim)) for dim in range(x.ndim)]
        self.chance.shuffle(dims)
        return aten.permute.default(x, [*dims, *[one][: self.chance.random() < 0.1]])

    def expand(self) -> Tensor:
        shape = self.shape(self.chance.randint(0, 4))
        asked = [self.chance.choice((-1, size, size, size, self.chance.choice(self.sizes))) for size in shape]
        more = [self.chance.choice([*self.sizes, -1, 0]) for _ in range(self.chance.choice((0, 0, 1, 2)))]
        return aten.expand.default(self.tensor(shape), more + asked)

    def cumsum(self) -> Tensor:
        x = self.tensor(self.shape(self.chance.randint(1, 4)), self.chance.choice((self.dtype, torch.bool)))
        return aten.cumsum.default(x, self.chance.randint(-x.ndim - 1, x.ndim))

    def norm(self) -> Tensor:
        shape = [*self.shape(self.chance.randint(1, 3)), self.chance.choice((3, 8))]
        x, kept = self.tensor(shape), [self.chance.random() < 0.7 for _ in range(2)]
        if self.chance.random() < 0.5:
            dims = shape[self.chance.randrange(len(shape)) :] if self.chance.random() < 0.3 else shape[-1:]
            weight, bias = (self.tensor(dims) if keep else None for keep in kept)
            return self.chance.choice(aten.native_layer_norm.default(x, dims, weight, bias, 1e-5))
        weight, bias, mean, variance = (self.tensor(shape[1:2]) if keep else None for keep in (*kept, True, True))
        norm = aten._native_batch_norm_legit_no_training.default
        x = self.given.new_empty(shape, dtype=self.dtype)  # whose norm lies row by row in torch, too
        return self.chance.choice(norm(x, weight, bias, mean, variance, 0.1, 1e-5))

    def mm(self) -> Tensor:
        a, b = self.shape(2), self.shape(2)
        inner = [a[1], self.chance.choice(b)]
        dtype = self.chance.choice([self.dtype] * 8 + [torch.float64])
        return aten.mm.default(self.tensor(a), self.tensor([inner[self.chance.random() < 0.2], b[1]], dtype))

    def addmm(self) -> Tensor:
        a, b = self.shape(2), self.shape(2)
        bias = [[b[1]], [b[1]], [a[0], b[1]], [1]][self.chance.randrange(4)]
        return aten.addmm.default(self.tensor(bias), self.tensor(a), self.tensor([a[1], b[1]]))

    def elementwise(self) -> Tensor:
        shape = self.shape(self.chance.randint(1, 4))
        other = [1 if self.chance.random() < 0.3 else size for size in shape][self.chance.randint(0, len(shape)) :]
        tensors = [self.tensor(shape), self.tensor(other, self.chance.choice((self.dtype, torch.int64)))]
        self.chance.shuffle(tensors)
        operator: Callable[..., Tensor] = self.chance.choice((torch.add, torch.mul, torch.eq, torch.div, torch.minimum))
        return operator(*tensors) if self.chance.random() < 0.7 else tensors[0].clamp(0, 5)


KINDS = (
    Maker.view, Maker.heads, Maker.part, Maker.cat, Maker.embedding, Maker.index, Maker.stack, Maker.clone, Maker.sum,
    Maker.mm, Maker.addmm, Maker.elementwise, Maker.same, Maker.turned, Maker.expand, Maker.cumsum, Maker.norm,
)  # fmt: skip


def traced(kind: Callable[[Maker], Tensor], seed: int) -> tuple[object, ...]:
    """What is known about the result, what was asked to know it, or the error."""
    inputs = flatten((torch.ones(4, 5),), {})
    with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        fakes = FakeInputs(inputs, ((4, 5),), set(), set())
        with fakes.fake_mode, enable_python_dispatcher():
            maker = Maker(fakes.tensors[0], seed)
            try:
                y = kind(maker)
            except Exception as error:
                return (isinstance(error, (RuntimeError, ValueError, IndexError)),)
    asked = sorted({str(guard.expr) for guard in fakes.shape_env.guards})
    spelled = str(tuple(y.shape)), str(y.stride()), str(y.storage_offset())
    return y.dtype, y.device, y.is_neg(), y.is_conj(), y.requires_grad, *spelled, asked


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_as_torch(kind: Callable[[Maker], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[bool] = Counter()

    def watched(short: Callable[..., Any]) -> Callable[..., Any]:
        def way(*args: Any, **kwargs: Any) -> Any:
            found = short(*args, **kwargs)
            taken[found is not None] += 1
            return found

        return way

    monkeypatch.setattr(elementwise, "SHORT", {op: watched(short) for op, short in elementwise.SHORT.items()})
    monkeypatch.setattr(elementwise.CaptureFakeMode, "_elementwise", watched(elementwise.CaptureFakeMode._elementwise))
    found = [traced(kind, seed) for seed in range(CASES)]
    assert min(taken[True], taken[False]) > CASES // 20, taken
    monkeypatch.setattr(elementwise.CaptureFakeMode, "dispatch", FakeTensorMode.dispatch)
    for seed, result in enumerate(found):
        assert result == traced(kind, seed), f"seed {seed}"


def test_constructors_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [traced(Maker.constructed, seed) for seed in range(CASES)]
    monkeypatch.setattr(elementwise, "CONSTRUCTORS", frozenset())
    assert found == [traced(Maker.constructed, seed) for seed in range(CASES)]


def test_a_view_shares_memory() -> None:
    fakes = FakeInputs(flatten((torch.ones(4, 6),), {}), ((4, 6),), set(), set())
    with fakes.fake_mode, enable_python_dispatcher():
        x = fakes.tensors[0]
        assert x.view(-1).untyped_storage()._cdata == x.untyped_storage()._cdata
        part = x.requires_grad_().detach()
        assert part.untyped_storage()._cdata == x.untyped_storage()._cdata and not part.requires_grad and part.is_leaf
