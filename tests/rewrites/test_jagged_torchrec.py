"""TorchRec's unsharded collections: one call each, with eager's numbers, gradients and errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt import optimize
from fxopt.runtime import dispatcher_of
from tests.rewrites.test_jagged import is_one_call

modules = pytest.importorskip("torchrec.modules.embedding_modules")
configs = pytest.importorskip("torchrec.modules.embedding_configs")
KeyedJaggedTensor = pytest.importorskip("torchrec.sparse.jagged_tensor").KeyedJaggedTensor
KeyedTensor = pytest.importorskip("torchrec.sparse.jagged_tensor").KeyedTensor

ROWS = 20
FEATURES = [["a"], ["b", "c"], ["d", "b"]]  # by table: b is in two


def bags(pooling: str = "SUM", weighted: bool = False) -> nn.Module:
    tables = [
        configs.EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim,
            num_embeddings=ROWS,
            feature_names=list(names),
            pooling=configs.PoolingType[pooling],
        )
        for i, (names, dim) in enumerate(zip(FEATURES, (8, 3, 16), strict=True))
    ]
    return modules.EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def sequences() -> nn.Module:
    tables = [
        configs.EmbeddingConfig(name=f"t{i}", embedding_dim=8, num_embeddings=ROWS, feature_names=list(names))
        for i, names in enumerate(FEATURES)
    ]
    return modules.EmbeddingCollection(tables=tables)


def keyed(batch: int, keys: str = "xbdac", dtype: torch.dtype = torch.int64, **more: Any) -> Any:
    """Features of any order, one of them unknown, one without ids."""
    lengths = torch.randint(0, 4, (len(keys), batch), dtype=dtype)
    lengths[random.randrange(len(keys))] = 0
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), dtype=dtype)
    weights = torch.rand(len(ids)) if more.pop("weighted", False) else None
    return KeyedJaggedTensor(keys=list(keys), values=ids, lengths=lengths.flatten(), weights=weights, **more)


def again(features: Any) -> Any:
    """As a data loader gives it: nothing is known of it yet."""
    return KeyedJaggedTensor(features.keys(), features.values(), features.weights_or_none(), features.lengths())


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def same(found: Any, expected: Any) -> bool:
    pairs = zip(tensors(found), tensors(expected), strict=True)
    return type(found) is type(expected) and all(a.equal(b) for a, b in pairs)


@pytest.mark.parametrize("make", [bags, lambda: bags("MEAN"), sequences])
@pytest.mark.parametrize("keys", ["xbdac", "abcd"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_collections(make: Callable[[], nn.Module], keys: str, dtype: torch.dtype) -> None:
    model = make().eval()
    optimized = optimize(model)
    for batch in (3, 1, 20):
        features = keyed(batch, keys, dtype)
        assert same(optimized(again(features)), model(again(features)))
    assert is_one_call(optimized)


@torch.no_grad()
def test_weights() -> None:
    model = bags(weighted=True).eval()
    optimized = optimize(model)
    for batch in (3, 1, 20):
        features = keyed(batch, weighted=True)
        assert same(optimized(again(features)), model(again(features)))
    assert is_one_call(optimized)


@pytest.mark.parametrize("make", [bags, sequences])
@torch.no_grad()
def test_lengths_of_features_and_bags(make: Callable[[], nn.Module]) -> None:
    """As [F, B], which makes F a part of the form, and leaves B open."""
    model = make().eval()
    optimized = optimize(model)
    for batch in (5, 4, 1, 7):  # 5 is no other size of the model
        lengths = torch.full((4, batch), 2)
        ids = torch.randint(0, ROWS, (8 * batch,))
        found, expected = (
            called(KeyedJaggedTensor(list("abcd"), ids, lengths=lengths)) for called in (optimized, model)
        )
        assert same(found, expected)
    assert is_one_call(optimized)


@torch.no_grad()
def test_what_was_asked_before_changes_nothing() -> None:
    model = bags().eval()
    optimized = optimize(model)
    for ask in (lambda k: None, lambda k: k.lengths(), lambda k: k.length_per_key(), lambda k: k.sync()):
        features = again(keyed(3))
        ask(features)
        assert same(optimized(features), model(features))
    assert is_one_call(optimized)
    features = again(keyed(3))
    features.offsets()
    assert same(optimized(features), model(features))


@torch.no_grad()
def test_offsets_alone() -> None:
    """Lengths that a forward works out stay with the features, as in eager."""
    model = bags().eval()
    optimized = optimize(model)
    for batch in (3, 1, 20):
        known = keyed(batch)
        features = KeyedJaggedTensor(known.keys(), known.values(), offsets=known.offsets())
        result = optimized(features)
        assert features.lengths_or_none().equal(known.lengths()) and same(result, model(known))
    (entry,) = dispatcher_of(optimized).entries
    assert "item" not in str(entry.executable.graph.graph).replace("getitem", "")


@torch.no_grad()
def test_one_feature_and_groups_of_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.one = bags(), nn.EmbeddingBag(ROWS, 4, mode="sum", include_last_offset=True)

        def forward(self, features: Any) -> list[Tensor]:
            one = features["b"]
            pooled = self.bags(features)
            return [*KeyedTensor.regroup([pooled], [["a", "d"], ["c"]]), self.one(one.values(), one.offsets())]

    model = Model().eval()
    optimized = optimize(model)
    for batch in (3, 20):
        features = keyed(batch)
        found, expected = optimized(again(features)), model(again(features))
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None, entry.findings.eager_reason


def gradients(called: nn.Module, model: nn.Module, features: Any) -> tuple[Tensor, ...]:
    loss = sum(t.square().sum() for t in tensors(called(features)) if t.requires_grad)
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("make", [bags, sequences])
def test_gradients(make: Callable[[], nn.Module]) -> None:
    model = make()
    optimized = optimize(model)
    for batch in (3, 1):
        features = keyed(batch)
        found, expected = (gradients(called, model, again(features)) for called in (optimized, model))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert is_one_call(optimized)


@pytest.mark.parametrize("make", [bags, sequences])
@torch.no_grad()
def test_a_bad_id_raises(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    optimized = optimize(model)
    features = KeyedJaggedTensor(list("abcd"), torch.arange(8), lengths=torch.full((8,), 1))
    optimized(again(features))
    features.values()[5] = ROWS
    with pytest.raises((IndexError, RuntimeError)) as expected:
        model(again(features))
    with pytest.raises(type(expected.value)):
        optimized(again(features))
    assert is_one_call(optimized)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16])
@torch.no_grad()
def test_quantized_collections(dtype: torch.dtype) -> None:
    quantize = pytest.importorskip("torchrec.inference.modules").quantize_embeddings
    tables = [
        configs.EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=ROWS, feature_names=list(names))
        for i, names in enumerate(FEATURES)
    ]
    model = quantize(nn.Sequential(modules.EmbeddingBagCollection(tables=tables)), dtype=dtype, inplace=False).eval()
    optimized = optimize(model)
    for batch in (3, 20):
        for keys in ("abcdb"[:4], "dcab"):
            features = keyed(batch, keys)
            torch.testing.assert_close(optimized(again(features)).values(), model(again(features)).values())
    bad = keyed(3, "abcd")
    bad.values()[:1] = ROWS + 3
    assert same(optimized(again(bad)), model(again(bad)))  # FBGEMM warns and takes row 0
    graphs = [entry.executable.graph for entry in dispatcher_of(optimized).entries if entry.executable is not None]
    assert len(graphs) == len(dispatcher_of(optimized).entries)
    assert not any("nbit" in graph.code for graph in graphs)
