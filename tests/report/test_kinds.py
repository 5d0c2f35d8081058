"""Which kind of work the nodes of captured models are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture import capture
from fxopt.report.kinds import COLUMNS, INDEX, INTERACTION, MLP, OTHER, is_lookup, is_operator, kinds

B, F, D, R = 6, 3, 4, 50


class Small(nn.Module):
    """Three tables, one bucketized column, a dot interaction and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(R, D) for _ in range(F))
        self.register_buffer("boundaries", torch.linspace(0, 1, R - 1))
        self.top = nn.Sequential(nn.Linear(F * F, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found = [self.tables[0](torch.bucketize(x[:, 0], self.boundaries))]
        found += [self.tables[i](ids[:, i].long() % R) for i in range(1, F)]
        vectors = torch.stack(found, dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(products.flatten(1)) + x.log1p().sum(1, keepdim=True) * 0


class Factorized(nn.Module):
    """A factorization machine over one big table with offsets, as in torchfm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(R, D)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids + 1)
        return (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(1)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.rand(B, 2), torch.randint(0, R, (B, F), dtype=torch.int32)


def captured(model: nn.Module, *args: Tensor) -> tuple[GraphModule, list[Tensor]]:
    with torch.no_grad():
        found = capture(model.eval(), args)
    return found.graph, [*(slot.read(model) for slot in found.state), *args]


def names(graph: GraphModule, kind: str) -> Counter[str]:
    found = kinds(graph.graph)
    return Counter(str(node.target).split(".")[1] for node in found if is_operator(node) and found[node] == kind)


@pytest.fixture(scope="module")
def small() -> tuple[GraphModule, list[Tensor]]:
    return captured(Small(), *inputs())


def test_lookups_and_their_collector_are_columns(small: tuple[GraphModule, list[Tensor]]) -> None:
    found = names(small[0], COLUMNS)
    assert found["embedding"] == F and found["stack"] == 1
    assert sum(map(is_lookup, small[0].graph.nodes)) == F


def test_what_feeds_the_lookups_is_index_preparation(small: tuple[GraphModule, list[Tensor]]) -> None:
    found = names(small[0], INDEX)
    assert found["bucketize"] == 1 and found["remainder"] == F - 1
    assert found["select"] == F  # also the float column that is only bucketized


def test_dense_layers_are_mlp(small: tuple[GraphModule, list[Tensor]]) -> None:
    found = names(small[0], MLP)
    assert found["linear"] == 2 and found["relu"] == found["batch_norm"] == found["dropout"] == 1


def test_products_of_columns_are_interaction(small: tuple[GraphModule, list[Tensor]]) -> None:
    assert names(small[0], INTERACTION)["bmm"] == 1
    assert names(small[0], OTHER)["log1p"] == 1


def test_factorization_machine_is_interaction() -> None:
    graph, _ = captured(Factorized(), torch.randint(0, R - 1, (B, F)))
    assert names(graph, INTERACTION) == Counter(sum=3, pow=2, sub=1)
    assert names(graph, COLUMNS) == Counter(embedding=1)


def test_masked_pooling_is_columns() -> None:
    class Pooled(Factorized):
        def forward(self, ids: Tensor) -> Tensor:
            mask = (ids != 0).unsqueeze(-1).float()
            return (self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)

    graph, _ = captured(Pooled(), torch.randint(0, R, (B, F)))
    assert names(graph, COLUMNS) >= Counter(embedding=1, mul=1, sum=1, div=1)
    assert not names(graph, INTERACTION)
