"""One capture serves every form of the features that a model looks up by name alone, and no form that may matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt import Config, optimize
from fxopt.runtime import dispatcher_of
from tests.rewrites.test_jagged_torchrec import FEATURES, ROWS, bags, sequences

torchrec = pytest.importorskip("torchrec")
pytest.importorskip("torchrec.models.dlrm")

CONFIG = Config(tune="off")


def quantized() -> nn.Module:
    quantize = pytest.importorskip("torchrec.inference.modules").quantize_embeddings
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=ROWS, feature_names=list(names))
        for i, names in enumerate(FEATURES)
    ]
    model = nn.Sequential(torchrec.EmbeddingBagCollection(tables=tables))
    return quantize(model, dtype=torch.qint8, inplace=False)[0]


class Named(nn.Module):
    """Looks up by name in a collection, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.own = bags(), nn.EmbeddingBag(ROWS, 3, mode="sum", include_last_offset=True)

    def forward(self, features: Any) -> list[Tensor]:
        one = features["b"]
        return [self.bags(features).values(), self.own(one.values(), one.offsets())]


def features_of(keys: str, batch: int, dtype: torch.dtype = torch.int64, weighted: bool = False) -> Any:
    """Of any keys, one of them without ids."""
    lengths = torch.randint(0, 4, (len(keys), batch), dtype=dtype)
    lengths[random.randrange(len(keys))] = 0
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), dtype=dtype)
    weights = torch.rand(len(ids)) if weighted else None
    return torchrec.KeyedJaggedTensor(list(keys), ids, weights, lengths=lengths.flatten())


def again(features: Any, form: str = "lengths") -> Any:
    """As a data loader gives it: lengths, offsets or both are known."""
    parts = {"lengths": features.lengths(), "offsets": features.offsets()}
    known = parts if form == "both" else {form: parts[form]}
    return torchrec.KeyedJaggedTensor(features.keys(), features.values(), features.weights_or_none(), **known)


def assert_same(found: Any, expected: Any) -> None:
    one, two = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert one[1] == two[1]
    for a, b in zip(one[0], two[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def captures(model: nn.Module) -> int:
    return len(dispatcher_of(model).entries)


@pytest.mark.parametrize("make", [bags, sequences, quantized, Named])
@pytest.mark.parametrize("first", ["lengths", "both", "offsets"])
@torch.no_grad()
def test_any_keys_and_offsets(make: Callable[[], nn.Module], first: str) -> None:
    model = make().eval()
    fast = optimize(model, config=CONFIG)
    fast(again(features_of("bxadc", 5), first))
    before = captures(fast)
    for keys in ("abcd", "dcba", "bxadc", "yabcdx", "zdaycbx"):
        for form in ("lengths", "both", "offsets"):
            for batch in (5, 1, 9):
                features = features_of(keys, batch)
                given, other = again(features, form), again(features, form)
                assert_same(fast(given), model(other))
                assert given.lengths().equal(other.lengths())
    assert captures(fast) == before == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_weights(dtype: torch.dtype) -> None:
    model = bags(weighted=True).eval()
    fast = optimize(model, config=CONFIG)
    for keys in ("abcd", "xdcba", "cabd"):
        features = features_of(keys, 6, dtype, weighted=True)
        assert_same(fast(again(features)), model(again(features)))
    assert captures(fast) == 1


def test_gradients() -> None:
    model = bags()
    fast = optimize(model, config=CONFIG)
    for keys in ("abcd", "xdcba"):
        features = features_of(keys, 6)
        found, expected = (
            torch.autograd.grad(each(again(features)).values().square().sum(), list(model.parameters()))
            for each in (fast, model)
        )
        torch.testing.assert_close(found, expected)
    assert captures(fast) == 1


@torch.no_grad()
def test_a_model_of_collections_within_a_batch() -> None:
    from torchrec.datasets.utils import Batch
    from torchrec.models.dlrm import DLRM, DLRMTrain

    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{key}", embedding_dim=4, num_embeddings=ROWS, feature_names=[key])
        for key in "abc"
    ]
    model = DLRMTrain(DLRM(torchrec.EmbeddingBagCollection(tables=tables), 3, [5, 4], [6, 1])).eval()
    fast = optimize(model, config=CONFIG)
    for keys, form in (("abc", "lengths"), ("xcba", "both"), ("cab", "lengths")):
        features = features_of(keys, 7)
        dense, labels = torch.randn(7, 3), torch.randint(0, 2, (7,))
        found, expected = (each(Batch(dense, again(features, form), labels)) for each in (fast, model))
        torch.testing.assert_close(found, expected)
    assert captures(fast) == 1


def varied(keys: str, batch: int, weighted: bool = False) -> Any:
    """Features of 2 to 8 bags each, from which a batch takes its rows."""
    strides = torch.randint(1, 5, (len(keys), 2))
    bags = strides.sum(1)
    lengths = torch.randint(0, 4, (int(bags.sum()),))
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    inverse = torch.stack([torch.randint(0, int(size), (batch,)) for size in bags])
    return torchrec.KeyedJaggedTensor(
        list(keys), ids, torch.rand(len(ids)) if weighted else None, lengths,
        stride_per_key_per_rank=strides.tolist(), inverse_indices=(list(keys), inverse),
    )  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("regular_first", [False, True])
@torch.no_grad()
def test_batch_sizes_of_their_own(weighted: bool, regular_first: bool) -> None:
    model = bags(weighted=weighted).eval()
    fast = optimize(model, config=CONFIG)
    if regular_first:
        fast(features_of("abcd", 5, weighted=weighted))
    for keys in ("abcd", "xdcba"):
        for batch in (7, 1, 12):
            features = varied(keys, batch, weighted)
            assert_same(fast(features), model(features))
            features = features_of(keys, batch, weighted=weighted)
            assert_same(fast(features), model(features))
    (entry,) = dispatcher_of(fast).entries
    assert entry.findings.eager_reason == ""


@torch.no_grad()
def test_long_bags_of_many_rows_are_looked_up_once() -> None:
    """They stay eager, and the calls behind them do not."""
    model = bags().eval()
    fast = optimize(model, config=CONFIG)
    ids, inverse = torch.randint(0, ROWS, (400,)), torch.zeros(4, 50, dtype=torch.int64)
    for length in (100, 100, 2, 100, 2):
        lengths = torch.full((4,), length)
        features = torchrec.KeyedJaggedTensor(
            list("abcd"), ids[: 4 * length], lengths=lengths, stride_per_key_per_rank=[[1]] * 4,
            inverse_indices=(list("abcd"), inverse),
        )  # fmt: skip
        assert_same(fast(features), model(features))
    assert [entry.findings.eager_reason for entry in dispatcher_of(fast).entries] == [""]
    assert any("looks up each bag once" in str(found.eager_reason) for found in dispatcher_of(fast).findings)


def test_gradients_of_batch_sizes_of_their_own() -> None:
    model = bags()
    fast = optimize(model, config=CONFIG)
    for batch in (6, 3):
        features = varied("abcd", batch)
        found, expected = (
            torch.autograd.grad(each(features).values().square().sum(), list(model.parameters()))
            for each in (fast, model)
        )
        torch.testing.assert_close(found, expected)
    assert captures(fast) == 1


@torch.no_grad()
def test_batch_sizes_that_matter_stay_those_of_the_features() -> None:
    """A collection that does not pool returns as many rows as there are ids, and lengths of each batch."""
    model = sequences().eval()
    fast = optimize(model, config=CONFIG)
    fast(features_of("abcd", 5))
    features = varied("abcd", 5)
    assert_same(fast(features), model(features))


@torch.no_grad()
def test_inverse_indices_out_of_range_are_as_in_eager() -> None:
    model = bags().eval()
    fast = optimize(model, config=CONFIG)
    fast(varied("abcd", 5))
    for wrong in (99, -1):
        features = varied("abcd", 5)
        features.inverse_indices()[1][1, 2] = wrong
        try:
            expected = model(features)
        except Exception as error:
            with pytest.raises(type(error)):
                fast(features)
        else:
            assert_same(fast(features), expected)


@torch.no_grad()
def test_inverse_indices_in_another_order() -> None:
    """The pytree of a KeyedJaggedTensor does not tell their keys."""
    model = bags().eval()
    fast = optimize(model, config=CONFIG)
    for order in ("abcd", "dcba", "abcd"):
        features = features_of("abcd", 5)
        inverse = list(order), torch.randint(0, 5, (4, 8))
        features = torchrec.KeyedJaggedTensor(
            features.keys(), features.values(), lengths=features.lengths(), inverse_indices=inverse
        )
        assert_same(fast(features), model(features))


class Ordered(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.bags, self.read = bags(), read

    def forward(self, features: Any) -> Any:
        return self.bags(features).values(), self.read(features)


@pytest.mark.parametrize(
    "read",
    [
        lambda features: features.values() * 2,
        lambda features: features[features.keys()[0]].values() + 1,
        lambda features: [part.values() + 1 for part in features.to_dict().values()],
        lambda features: torch.zeros(1) if features.offsets_or_none() is None else torch.ones(1),
        lambda features: features.split([1, len(features.keys()) - 1])[0].values() + 1,
        lambda features: features,
    ],
)
@torch.no_grad()
def test_a_form_that_matters_is_captured_by_itself(read: Callable[[Any], Any]) -> None:
    model = Ordered(read).eval()
    fast = optimize(model, config=CONFIG)
    for keys, form in (("abcd", "lengths"), ("dcba", "lengths"), ("dcba", "both")):
        features = features_of(keys, 6)
        given, other = again(features, form), again(features, form)
        found, expected = fast(given), model(other)
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])


@torch.no_grad()
def test_what_a_mode_reads_is_asked_in_that_mode() -> None:
    class Model(Ordered):
        def forward(self, features: Any) -> Any:
            return super().forward(features) if self.training else self.bags(features).values()

    model = Model(lambda features: features.values() + 1)
    fast = optimize(model, config=CONFIG)
    for training in (True, False, True):
        fast.train(training)
        for keys in ("abcd", "dcba"):
            features = features_of(keys, 6)
            assert_same(fast(again(features)), model(again(features)))


@pytest.mark.parametrize("change", ["missing", "twice", "long", "short", "negative"])
@torch.no_grad()
def test_what_does_not_fit_is_as_in_eager(change: str) -> None:
    model = bags().eval()
    fast = optimize(model, config=CONFIG)
    fast(features_of("abcd", 4))
    assert captures(fast) == 1
    keys = {"missing": "dca", "twice": "dcbaa"}.get(change, "dcba")
    lengths, ids = torch.full((4 * len(keys),), 2), torch.randint(0, ROWS, (8 * len(keys),))
    ids = ids[:-3] if change == "short" else torch.cat([ids, ids[:2]]) if change == "long" else ids
    if change == "negative":
        lengths[:2] = torch.tensor([-1, 5])
    given = torchrec.KeyedJaggedTensor(list(keys), ids, lengths=lengths)
    try:
        expected = model(again(given))
    except Exception as error:
        with pytest.raises(type(error)):
            fast(again(given))
    else:
        assert_same(fast(again(given)), expected)


@torch.no_grad()
def test_a_bad_id_of_another_form_raises() -> None:
    model = bags().eval()
    fast = optimize(model, config=CONFIG)
    fast(features_of("abcd", 3))
    given = torchrec.KeyedJaggedTensor(
        list("xdcba"), torch.full((15,), ROWS), lengths=torch.ones(15, dtype=torch.int64)
    )
    with pytest.raises(IndexError, match=r"t0.*id 20 at row 0"):
        fast(given)
    assert captures(fast) == 1


@torch.no_grad()
def test_a_bad_id_in_the_first_call_of_a_quantized_collection() -> None:
    """FBGEMM repairs it, so eager serves that call; a later one is captured."""
    model = quantized().eval()
    fast = optimize(model, config=CONFIG)
    for bad in (True, False):
        features = features_of("abcd", 5)
        features.values()[:1] = ROWS + 3 if bad else 0
        assert_same(fast(again(features)), model(again(features)))
    for _ in range(2):
        features = features_of("abcd", 5)
        assert_same(fast(again(features)), model(again(features)))
    assert [entry.findings.eager_reason for entry in dispatcher_of(fast).entries] == [""]
