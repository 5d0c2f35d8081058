"""One capture of the whole pipeline serves every batch size and every multi-hot length, whatever the example's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from examples.dlrm import model as dlrm
from fxopt.runtime import dispatcher_of

pytestmark = pytest.mark.timed  # the whole pipeline
SIZES = [(64, 5), (64, 1), (1, 1), (1, 3), (5, 2), (0, 3), (2, 64), (64, 64), (4096, 7)]
PADDED = [*SIZES, (5, 0), (0, 0)]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 9, shape)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(9, 4), nn.Embedding(9, 3)
        self.bag = nn.EmbeddingBag(9, 2, mode="sum")
        self.ends = nn.EmbeddingBag(9, 2, mode="mean", include_last_offset=True)


class FixedBags(Tables):
    def forward(self, x):
        return F.embedding_bag(x, self.first.weight, mode="mean")


class BagBesideTransposed(Tables):
    def forward(self, x, y):
        return torch.cat([self.bag(x), self.first(y[1])], 1)


class BagWeights(Tables):
    def forward(self, x, weights):
        return self.bag(x, per_sample_weights=weights)


class Offsets(Tables):
    def forward(self, x, offsets, y):
        return torch.cat([self.ends(x, offsets), self.first(y.unbind(0)[1])], -1)


class Transposed(Tables):
    def forward(self, y):
        return torch.cat([self.first(y.t()[:, 1].long() % 9), self.second(y.t()[:, 0].long() % 9)], 1)


class WeightedByBmm(Tables):
    def forward(self, x, weights):
        return torch.bmm(weights.unsqueeze(1), self.first(x)).squeeze(1)


class MaskedMean(Tables):
    def forward(self, x):
        mask = (x != 0).unsqueeze(-1).float()
        return (self.first(x) * mask).sum(1) / mask.sum(1).clamp(min=1)


class Pooled(Tables):
    def forward(self, x):
        return torch.cat([self.first(x).sum(1), self.second(x).mean(1)], 1)


class LargestOf(Tables):
    def forward(self, x):
        return self.first(x).amax(1)


class Attention(Tables):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, query, x):
        keys = self.first(x)
        query = self.first(query).unsqueeze(1).expand(-1, keys.size(1), -1)
        scores = self.score(torch.cat([query, keys, query - keys, query * keys], -1)).squeeze(-1).softmax(1)
        return torch.bmm(scores.unsqueeze(1), keys).squeeze(1)


class Ends(Tables):
    def forward(self, x):
        e = self.first(x)
        return e[:, 0] + e[:, -1] + e[:, 1:].sum(1)


MODELS = {
    FixedBags: (lambda b, n: (ids(b, n),), SIZES),
    BagBesideTransposed: (lambda b, n: (ids(b, n), ids(5, b)), SIZES),
    BagWeights: (lambda b, n: (ids(b, n), torch.rand(b, n)), SIZES),
    Offsets: (lambda b, n: (ids(b * n), torch.arange(b + 1) * n, ids(5, b)), PADDED),
    Transposed: (lambda b, n: (torch.rand(5, b) * 20,), PADDED),
    WeightedByBmm: (lambda b, n: (ids(b, n), torch.rand(b, n)), PADDED),
    MaskedMean: (lambda b, n: (ids(b, n),), PADDED),
    Pooled: (lambda b, n: (ids(b, n),), PADDED),
    LargestOf: (lambda b, n: (ids(b, n),), SIZES),
    Attention: (lambda b, n: (ids(b), ids(b, n)), PADDED),
    Ends: (lambda b, n: (ids(b, n),), SIZES),
}


@pytest.mark.parametrize("example", [(64, 5), (1, 1), (0, 3), (5, 0)])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_every_size(kind, example):
    make, sizes = MODELS[kind]
    if example not in sizes:
        pytest.skip("the model itself refuses this size")
    model = kind().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, make(*example))
        for size in sizes:
            inputs = make(*size)
            torch.testing.assert_close(fast(*inputs), model(*inputs), equal_nan=True)
    assert [f.eager_reason for f in dispatcher_of(fast).findings] == [""]


@pytest.mark.parametrize(
    "kind", [kind for kind, (_, sizes) in MODELS.items() if sizes is SIZES], ids=lambda k: k.__name__
)
def test_a_length_that_eager_refuses_stays_an_error(kind):
    make, _ = MODELS[kind]
    model = kind().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, make(5, 3))
        inputs = make(5, 0)
        with pytest.raises((RuntimeError, IndexError)) as eager:
            model(*inputs)
        with pytest.raises(type(eager.value)):
            fast(*inputs)


@pytest.mark.parametrize("example", [64, 1, 0])
def test_dlrm(example):
    model = dlrm.build_model()
    with torch.no_grad():
        fast = fxopt.optimize(model, dlrm.example_inputs(example))
        for batch in (0, 1, 2, 7, 64, 4096):
            inputs = dlrm.example_inputs(batch)
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert [f.eager_reason for f in dispatcher_of(fast).findings] == [""]
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable.capture.guards.relations == ()


class Scores(nn.Module):
    """Users and items, one of which may be one for all of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(20, 4), nn.Embedding(20, 4)
        self.layer = nn.Linear(8, 1)

    def forward(self, users, items):
        user, item = self.user(users), self.item(items)
        return (user * item).sum(-1) + self.layer(torch.cat([user * item, user - item], 1)).squeeze(1)


class StackedOffsets(nn.Module):
    """As Meta's DLRM is called: a list of ids for each feature, and one tensor with the offsets of all."""

    def __init__(self, offsets: str, batch: int = 0) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50 + k, 3, include_last_offset=offsets == "ends") for k in range(8))
        self.batch = batch

    def forward(self, offsets, ids):
        if self.batch and offsets.shape[1] != self.batch:
            raise ValueError(f"expected {self.batch} rows")
        return torch.cat([table(x, of) for table, x, of in zip(self.tables, ids, offsets, strict=True)], 1)


@pytest.mark.parametrize("kind", ["starts", "ends"])
def test_offsets_of_all_features_in_one_tensor(kind):
    """The numbers of ids of eight features coincide in each call, otherwise each time."""
    model = StackedOffsets(kind).eval()
    fast = fxopt.optimize(model)
    for batch in (16, 16, 16, 5, 1, 40):
        lengths = torch.randint(0, 3, (8, batch))
        ends = F.pad(lengths.cumsum(1), (1, 0))
        inputs = ends if kind == "ends" else ends[:, :-1], [torch.randint(0, 50, (int(n),)) for n in lengths.sum(1)]
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), model(*inputs))
    (found,) = dispatcher_of(fast).findings
    assert not found.eager_reason and found.witness


def test_offsets_of_a_fixed_batch():
    model = StackedOffsets("starts", 16).eval()
    fast = fxopt.optimize(model)
    for _ in range(4):
        lengths = torch.randint(0, 3, (8, 16))
        inputs = lengths.cumsum(1) - lengths, [torch.randint(0, 50, (int(n),)) for n in lengths.sum(1)]
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert not any(found.eager_reason for found in dispatcher_of(fast).findings)


@pytest.mark.parametrize("first", [(7, 7), (1, 7), (7, 1)])
def test_one_user_and_many_items(first):
    model = Scores()
    fast = fxopt.optimize(model)
    with torch.no_grad():
        for sizes in (first, (1, 7), (7, 7), (1, 9), (1, 1), (7, 1), (5, 5), (1, 0), (3, 1), (9, 9)):
            arguments = [ids(size) for size in sizes]
            torch.testing.assert_close(fast(*arguments), model(*arguments))
    assert not any(findings.eager_reason for findings in fast._fxopt.findings)
    assert len(fast._fxopt.findings) == 3
