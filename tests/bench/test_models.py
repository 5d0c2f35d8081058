from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from bench import model_e, model_f
from bench.models import E, F, ManyColumns, ModelE, make_inputs
from bench.verify import Judge


def tables(model: nn.Module) -> Counter:
    """(kind, rows, dim) of every table, without allocating the large ones twice."""
    return Counter(
        (type(m).__name__, *m.weight.shape) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    )


@pytest.fixture
def small(short_tables) -> ManyColumns:
    return ModelE(40)


@pytest.mark.parametrize(
    ("mix", "counts", "top"),
    [(E, (880, 50, 50, 15, 5), (1024, 1024, 128)), (F, (1000, 90, 100, 7, 3), (2048, 1024, 1024, 512))],
)
def test_full_size_models_have_the_published_columns(mix, counts, top):
    with torch.device("meta"):
        model = ManyColumns(mix)
    bucketize, int_hash, hashed, bags, large = counts
    assert tables(model) == {
        ("Embedding", 101, 8): bucketize,
        ("Embedding", 100, 8): int_hash,
        ("Embedding", 10_000, 8): hashed,
        ("EmbeddingBag", 10_000, 8): bags,
        ("EmbeddingBag", 1_000_000, 32): large,
    }
    assert all(column.boundaries.shape == (100,) for column in model.columns.floats)
    width = 32 + 8 * (bucketize + int_hash + hashed + bags) + 32 * large
    linears = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linears == [(32, 32), *zip((width, *top), (*top, 1), strict=True)]
    assert isinstance(model.top[-1], nn.Sigmoid)


@pytest.mark.parametrize(
    ("columns", "counts"), [(100, (87, 5, 5, 2, 1)), (5, (1, 1, 1, 1, 1)), (1000, (880, 50, 50, 15, 5))]
)
def test_scaled_keeps_the_proportions_and_one_of_each(columns, counts):
    mix = E.scaled(columns)
    assert (mix.bucketize, mix.int_hash, mix.hashed, mix.bags, mix.large_bags) == counts
    assert mix.columns == columns


def test_too_few_columns():
    with pytest.raises(ValueError, match="expected at least 5"):
        E.scaled(4)


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_forward(small, batch):
    inputs = make_inputs(small.mix, batch)
    assert small.columns(*inputs).shape == (batch, small.mix.width)
    assert small(*inputs).shape == (batch, 1)


def test_packed_inputs_hold_the_same_values(small):
    separate, packed = make_inputs(small.mix, 9), make_inputs(small.mix, 9, packed=True)
    assert packed[1].shape == (9, small.mix.bucketize)
    assert packed[2].shape == (9, small.mix.int_hash + small.mix.hashed)
    assert torch.equal(small(*separate), small(*packed))


def test_columns_only_is_the_concat(small):
    model = ModelE(40, columns_only=True)
    inputs = make_inputs(model.mix, 3)
    assert torch.equal(model(*inputs), small.columns(*inputs))


def test_inputs_reach_every_bucket_negative_ids_and_empty_bags():
    _, floats, ids, bags = make_inputs(E.scaled(40), 256)
    values, ids = torch.cat(floats), torch.cat(ids)
    assert values.min() < 0 and values.max() > 1  # beyond the first and the last boundary
    assert ids.min() < -(2**62) and ids.max() > 2**62
    for values, offsets in bags:
        lengths = torch.diff(offsets, append=torch.tensor([len(values)]))
        assert lengths.min() == 0 and lengths.max() == 10
        assert values.min() >= 0


def test_inputs_are_seeded():
    mix = E.scaled(10)
    same, other = make_inputs(mix, 4), make_inputs(mix, 4, seed=1)
    assert torch.equal(make_inputs(mix, 4)[0], same[0])
    assert not torch.equal(same[0], other[0])


def test_outputs_differ_from_row_to_row(small):
    assert small(*make_inputs(small.mix, 64)).std() > 0.05


@pytest.mark.parametrize("module", [model_e, model_f])
def test_files_follow_the_convention(module):
    _, floats, ids, bags = module.example_inputs(2)
    mix = E if module is model_e else F
    assert (len(floats), len(ids), len(bags)) == (mix.bucketize, mix.int_hash + mix.hashed, mix.bags + mix.large_bags)
    assert module.build_model.__annotations__["return"] == "ManyColumns"


def test_eager_is_within_its_own_budget(small):
    inputs = make_inputs(small.mix, 5)
    assert Judge(small).expect(inputs).check("eager", small(*inputs)) < 1e-6
