"""The caller's default device is where the caller's tensors are made, and none of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import optimizers
from fxopt.runtime import dispatcher_of


class Small(nn.Module):
    """Columns, a tower, attention, products and a sum of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20 + i, 16) for i in range(6))
        self.items, self.bag = nn.Embedding(40, 16), nn.EmbeddingBag(30, 16)
        self.dense = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.projected, self.norm, self.top = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, ids: Tensor, offsets: Tensor, x: Tensor, items: Tensor, lengths: Tensor) -> Tensor:
        rows = self.items(items)
        mask = torch.arange(items.shape[1], device=x.device) < lengths.unsqueeze(1)
        q, k, v = self.projected(rows).chunk(3, -1)
        rows = self.norm(rows + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1)))
        pooled = (rows * mask.unsqueeze(-1)).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        columns = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([pooled, self.bag(items.flatten(), offsets), self.dense(x), *columns], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = torch.triu_indices(9, 9, 1, device=x.device)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        best = products.flatten(1).topk(3).values
        return self.top(vectors.sum(1)) + pairs / 2 + products[:, i, j].sum(1, keepdim=True) + best.sum(1, keepdim=True)


def arguments(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cpu").manual_seed(batch)

    def drawn(start: int, stop: int, *shape: int) -> Tensor:
        return torch.randint(start, stop, shape, generator=generator, device="cpu")

    offsets = torch.arange(0, 5 * batch, 5, device="cpu")
    x = torch.rand(batch, 5, generator=generator, device="cpu")
    return drawn(0, 20, batch, 6), offsets, x, drawn(0, 30, batch, 5), drawn(1, 6, batch)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors of no memory: whoever reads one made without a device fails."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("grad", [False, True])
def test_a_model_on_the_cpu_is_optimized_the_same(grad: bool, elsewhere: None) -> None:
    with torch.device("cpu"):
        model = Small()
    other = copy.deepcopy(model)
    with torch.set_grad_enabled(grad):
        fast = fxopt.optimize(other, arguments(7))
        (entry,) = dispatcher_of(fast).entries
        assert entry.executable is not None and sum(len(ran.changes) for ran in entry.findings.passes) > 5
        for batch in (7, 3, 1):
            expected, found = model(*arguments(batch)), fast(*arguments(batch))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not [ran.rolled_back for ran in entry.findings.passes if ran.rolled_back]
    fxopt.report(fast)
    if grad:
        expected.sum().backward(), found.sum().backward()
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_packed_weights_are_on_the_cpu(precision: str, elsewhere: None) -> None:
    with torch.device("cpu"):
        model = Small().eval()
    with torch.no_grad():
        fast = fxopt.optimize(copy.deepcopy(model), arguments(7), fxopt.Config(precision=precision, max_error=0.1))
        assert dispatcher_of(fast).entries[0].executable is not None
        torch.testing.assert_close(fast(*arguments(7)), model(*arguments(7)), rtol=0.1, atol=3.0)


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.RowwiseAdagrad, optimizers.Adam])
def test_rows_are_updated_on_the_cpu(kind: type[optimizers.InBackward], elsewhere: None) -> None:
    with torch.device("cpu"):
        model = Small()
    tables, _ = optimizers.split(model)
    before = [table.detach().clone() for table in tables]
    kind(tables, lr=0.05)
    fxopt.optimize(model, arguments(7))(*arguments(7)).sum().backward()
    assert not any(torch.equal(old, new) for old, new in zip(before, tables, strict=True))
