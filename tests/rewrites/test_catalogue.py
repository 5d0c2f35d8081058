"""Every listed pass: fires on its own models and not on its near misses, with eager's numbers forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites import PASSES, passes
from tests.rewrites import attention, jagged, pointwise, products


class Columns(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4, dtype=dtype) for _ in range(3))

    def ids(self, x: Tensor) -> list[Tensor]:
        return list((x.abs() * 1000).long().remainder(10).unbind(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([table(ids) for table, ids in zip(self.tables, self.ids(x), strict=True)], 1)


class FlatColumns(Columns):
    """Lookups of [B, 1] ids, side by side."""

    def ids(self, x: Tensor) -> list[Tensor]:
        return [ids.unsqueeze(1) for ids in super().ids(x)]

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([table(ids) for table, ids in zip(self.tables, self.ids(x), strict=True)], -1)
        return joined.flatten(1)


class ColumnsOnRows(Columns):
    """A cat of batches is no concat of columns; every lookup alone has a plain program, so only the cat stays."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.tables[0].weight.mul_(1.0)  # an edit in place: nothing may move across it
        return self.tables[0](self.ids(x)[0])


class Triangle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale
        return torch.bmm(z, z.transpose(1, 2))[:, [1, 2, 2], [0, 0, 1]]


class TwoTriangles(Triangle):
    """Products of two different tensors."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale
        return torch.bmm(z, z.exp().transpose(1, 2))[:, [1, 2, 2], [0, 0, 1]]


class PairSum(Triangle):
    """The second order of a factorization machine."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale.T
        return 0.5 * (z.sum(1).square() - z.square().sum(1))


class SumOfOtherSquares(Triangle):
    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale.T
        return 0.5 * (z.sum(1).square() - (z + 1).square().sum(1))


class MaskedTriangle(Triangle):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale
        return torch.masked_select(torch.bmm(z, z.transpose(1, 2)), self.mask).view(-1, 6)


class MaskedByAnInput(MaskedTriangle):
    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale
        return torch.masked_select(torch.bmm(z, z.transpose(1, 2)), self.mask & (x.sum() == x.sum())).view(-1, 6)


class AttentionOverPairs(Triangle):
    """An attentional factorization machine."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.query = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)

    def activated(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale * self.scale.T
        pairs = z[:, [0, 0, 1]] * z[:, [1, 2, 2]]
        scores = self.query(self.activated(self.hidden(pairs))).softmax(1)
        return (scores * pairs).sum(1)


class AttentionWithTanh(AttentionOverPairs):
    def activated(self, x: Tensor) -> Tensor:
        return x.tanh()


class TriangleOfTwo(Triangle):
    """Vectors that no lookup writes."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.cat([(x @ self.scale).exp(), (x @ self.scale).sin()], 1)
        z = torch.cat([z.unsqueeze(1), (z.unsqueeze(1) * self.scale)], 1)
        return torch.bmm(z, z.transpose(1, 2))[:, [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]]


class ByAnInput(Triangle):
    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(2) * self.scale)[:, (x[0] * 0).long()]


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 2))

    def weight(self, i: int, j: int) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        z = x.unsqueeze(2) * self.scale
        return torch.stack([z[:, i] * z[:, j] * self.weight(i, j) for i in range(3) for j in range(i + 1)], 1)


class ProductsOfTheirOwn(Products):
    """No two pairs are computed alike."""

    def weight(self, i: int, j: int) -> float:
        return 1 + i + j / 4


class Guarded(Columns):
    def ids(self, x: Tensor) -> list[Tensor]:
        return [ids.clamp(0, 9).remainder(10) for ids in super().ids(x)]


class GuardedTooLow(Columns):
    """A clamp that changes ids."""

    def ids(self, x: Tensor) -> list[Tensor]:
        return [ids.clamp(0, 8) for ids in super().ids(x)]


class Tower(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.dense(x.to(self.dense.weight.dtype)))


class Pair(nn.Sequential):
    """Two layers with nothing in between."""

    def __init__(self, inner: int, outputs: int) -> None:
        super().__init__(nn.Linear(3, inner), nn.Linear(inner, outputs))


class Mask(Tower):
    """Sizes and a mask that depend on the batch alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        some = (torch.arange(5).repeat(y.size(0), 1) < 3).to(y.dtype)
        return (y * some).repeat(1, 2).view(y.size(0) * 2, 5)


class OnePerRow(Tower):
    """Its one size is needed and an input's; what it makes leaves the model."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(x.size(0), 3)


class Unsqueezed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.unsqueeze(1).transpose(1, 2).flatten(1))


class EditedCopy(Tower):
    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1].expand(-1, 3).clone()
        first[:, 1] += x[:, 2]
        return self.dense(first)


class SlicedAndJoined(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.dense(torch.cat([x[:, i : i + 1] for i in range(3)], 1))


class JoinedOutOfOrder(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.dense(torch.cat([x[:, i : i + 1] for i in (1, 0, 2)], 1))


class FromZero(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return (x.new_zeros(x.shape[0], 5) + self.dense(x)).sigmoid()


class MinusZero(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x[:, :1] + 0.0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))
        self.gate = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        experts = torch.stack([F.relu(expert(x)) for expert in self.experts], 1)
        return torch.bmm(self.gate(x).softmax(-1).unsqueeze(1), experts).squeeze(1)


class OneAfterTheOther(Experts):
    """A chain: nothing in it is parallel."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](self.gate(x))


@dataclass(frozen=True)
class Example:
    fires: Callable[[], nn.Module]
    misses: Callable[[], nn.Module]


CATALOGUE = {
    "disguised_linears": Example(products.MatrixOfEachRow, products.OneSidedColumns),
    "compressed_interaction": Example(products.Compressed, products.CompressedNeighbours),
    "k_largest": Example(products.Largest, products.LargestWithIndices),
    "recurrences": Example(products.Recurrent, products.BothWays),
    "ones": Example(products.CarriedAlong, products.OfItsOwn),
    "contractions": Example(products.OuterProducts, products.OuterProductsSeen),
    "convolutions": Example(products.EachPosition, products.NeighbouringPositions),
    "dead_checks": Example(Guarded, GuardedTooLow),
    "embedding_columns": Example(Columns, ColumnsOnRows),
    "jagged_checks": Example(jagged.OfRandomRows, jagged.OfOneFeature),
    "pair_attention": Example(AttentionOverPairs, AttentionWithTanh),
    "pair_sum": Example(PairSum, SumOfOtherSquares),
    "dot_interaction_parts": Example(TriangleOfTwo, Triangle),
    "dot_interaction": Example(Triangle, TwoTriangles),
    "field_index": Example(TwoTriangles, ByAnInput),
    "masked_fields": Example(MaskedTriangle, MaskedByAnInput),
    "sized_constants": Example(Mask, OnePerRow),
    "sizes": Example(Mask, OnePerRow),
    "linear_pairs": Example(lambda: Pair(9, 2), lambda: Pair(1, 4)),
    "linear_chains": Example(Tower, lambda: Tower(torch.float64)),
    "cats": Example(SlicedAndJoined, JoinedOutOfOrder),
    "identities": Example(FromZero, MinusZero),
    "pointwise": Example(pointwise.Gated, pointwise.GatedOnce),
    "crosses": Example(pointwise.Cross, pointwise.CrossBehindLayer),
    "repeated": Example(Products, ProductsOfTheirOwn),
    "attention": Example(attention.Heads, attention.HeadsOverRows),
    "target_attention": Example(attention.Pooled, attention.SeenInside),
    "towers": Example(Experts, OneAfterTheOther),
    "views": Example(Unsqueezed, EditedCopy),
    "views_of_columns": Example(FlatColumns, Columns),
}
ELSEWHERE = {
    "branches",
    "compressed_linears",
    "compressed_tables",
    "gpu_chains",
    "gpu_crosses",
    "gpu_dots",
    "gpu_dots_of_floats",
    "gpu_few_rows",
    "gpu_gathered_dots",
    "gpu_grouped_linears",
    "gpu_grouped_pointwise",
    "gpu_lookup_pairs",
    "gpu_mixtures",
    "gpu_pairs",
    "gpu_batched_linears",
    "gpu_joined_linears",
    "gpu_linears",
    "gpu_repeated_lookups",
    "gpu_turned_linears",
    "gpu_wide_linears",
    "lookup_products",
    "row_chunks",
    "table_batched",
}  # tests/cuda, test_compression.py, test_row_chunks.py, test_lookup_products.py, test_jagged_torchrec.py


WITHOUT_GRADIENTS = {"recurrences", "towers"}  # with gradients they stay as they are


def optimized(name: str, model: nn.Module, config: Config = Config(tune="off")) -> nn.Module:
    with torch.set_grad_enabled(name not in WITHOUT_GRADIENTS):
        return optimize(model, (torch.randn(6, 3),), config)


def applied(model: nn.Module, name: str) -> int:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason
    assert not any(ran.rolled_back for ran in findings.passes)
    return sum(len(ran.changes) for ran in findings.passes if ran.name == name)


def test_every_pass_has_its_example() -> None:
    assert {rewrite.name for rewrite in PASSES} == set(CATALOGUE) | ELSEWHERE
    assert all(rewrite.why for rewrite in PASSES), "the reason for its place in the order"


def test_a_pass_has_one_name_and_can_be_left_out_under_each_that_it_had() -> None:
    names = [name for rewrite in PASSES for name in rewrite.names]
    assert len(set(names)) == len(names)
    for old in ("gpu_attention", "gpu_cross_networks", "gpu_pointwise", "gpu_repeated", "gpu_target_attention"):
        asked = passes(Config(disable=(old,)))
        (left_out,) = {rewrite.name for rewrite in passes(Config())} - {rewrite.name for rewrite in asked}
        assert left_out in CATALOGUE


@pytest.mark.parametrize("name", CATALOGUE)
def test_fires_and_gives_eagers_numbers(name: str) -> None:
    model = CATALOGUE[name].fires()
    fast = optimized(name, model, Config(verify="full", tune="off"))
    assert applied(fast, name)
    for batch in (0, 1, 2, 7):
        x = torch.randn(batch, 3)
        with torch.set_grad_enabled(name not in WITHOUT_GRADIENTS):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
        expected, found = (
            torch.autograd.grad(net(x).square().sum(), list(model.parameters())) for net in (model, fast)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(fast._fxopt.entries) == 1 + (name in WITHOUT_GRADIENTS or not model.training)


@pytest.mark.parametrize("name", CATALOGUE)
def test_leaves_its_near_miss_alone(name: str) -> None:
    model = CATALOGUE[name].misses()
    fast = optimize(model, (torch.randn(6, 3),), Config(tune="off"))
    assert not applied(fast, name)
    x = torch.randn(5, 3)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("name", CATALOGUE)
def test_can_be_switched_off(name: str) -> None:
    fast = optimize(CATALOGUE[name].fires(), (torch.randn(6, 3),), Config(disable=(name,)))
    assert not applied(fast, name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_replacements_have_the_shapes_they_claim(name: str) -> None:
    fast = optimized(name, CATALOGUE[name].fires())
    executable = fast._fxopt.entries[0].executable
    (output,) = executable.graph.graph.find_nodes(op="output")
    claimed = output.args[0][0].meta["val"]
    found = fast(torch.randn(6, 3))
    assert claimed.dtype == found.dtype and claimed.dim() == found.dim()
    assert [int(size) for size in claimed.shape[1:]] == list(found.shape[1:])
