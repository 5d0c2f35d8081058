"""Features that lie back to back become one call, which reads all ids by the lengths of their bags."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxopt import optimize, report
from fxopt.runtime import dispatcher_of
from tests.rewrites.jagged import (
    FEATURES,
    ROWS,
    ByOffsets,
    Collection,
    Hashed,
    OtherOrder,
    Sequences,
    Sliced,
    Weighted,
    jagged,
)

BATCHES = (5, 1, 2, 33)


def targets(model: nn.Module) -> list[str]:
    (entry,) = dispatcher_of(model).entries
    assert entry.executable is not None, entry.findings.eager_reason
    return [str(node.target) for node in entry.executable.graph.graph.nodes if node.op == "call_function"]


def is_one_call(model: nn.Module) -> bool:
    found = targets(model)
    kinds = [any(name in target for target in found) for name in ("fxopt.columns", "fxopt.jagged_offsets")]
    return all(kinds) and not any("item" in target.replace("getitem", "") or "split" in target for target in found)


@pytest.mark.parametrize("make", [Collection, lambda: Collection("mean"), Sliced, Hashed])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_collections(make, dtype) -> None:
    model = make().eval()
    if make is Sliced and dtype == torch.int32:
        pytest.skip("embedding_bag refuses int32 ids with the int64 offsets that cumsum gives")
    optimized = optimize(model)
    for batch in BATCHES:
        given = jagged(batch, dtype)
        assert optimized(*given).equal(model(*given))
    assert is_one_call(optimized)


@torch.no_grad()
def test_lengths_may_be_a_matrix_and_bags_may_be_empty() -> None:
    model = Collection().eval()
    optimized = optimize(model)
    for batch, longest in ((4, 3), (2, 9), (6, 1)):
        ids, lengths = jagged(batch, longest=longest)
        given = ids, lengths.view(FEATURES, batch)
        assert optimized(*given).equal(model(*given))
    assert is_one_call(optimized)


@torch.no_grad()
def test_offsets_in_the_place_of_lengths() -> None:
    model = ByOffsets().eval()
    optimized = optimize(model)
    for batch in BATCHES:
        ids, lengths = jagged(batch)
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        assert optimized(ids, offsets).equal(model(ids, offsets))
    assert is_one_call(optimized)


@torch.no_grad()
def test_weights() -> None:
    model = Weighted().eval()
    optimized = optimize(model)
    for batch in BATCHES:
        ids, lengths = jagged(batch)
        given = ids, lengths, torch.randn(len(ids))
        assert optimized(*given).equal(model(*given))
    assert is_one_call(optimized)
    with pytest.raises(RuntimeError):
        optimized(ids, lengths, torch.randn(len(ids) + 1))


@torch.no_grad()
def test_sequences() -> None:
    model = Sequences().eval()
    optimized = optimize(model)
    for batch in BATCHES:
        given = jagged(batch)
        for found, expected in zip(optimized(*given), model(*given), strict=True):
            assert found.equal(expected) and found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert is_one_call(optimized)


@torch.no_grad()
def test_offsets_of_another_feature_are_not_mixed_up() -> None:
    model = OtherOrder().eval()
    optimized = optimize(model)
    lengths = torch.full((FEATURES * 4,), 2)
    ids = torch.randint(0, ROWS, (FEATURES * 8,))
    assert optimized(ids, lengths).equal(model(ids, lengths))
    assert not is_one_call(optimized)


@pytest.mark.parametrize("make", [Collection, Sequences])
def test_gradients(make) -> None:
    model = make()
    optimized = optimize(model)
    for batch in (5, 1):
        given = jagged(batch)
        found, expected = (
            torch.autograd.grad(_loss(called(*given)), list(model.parameters())) for called in (optimized, model)
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert is_one_call(optimized)


def _loss(result: Tensor | list[Tensor]) -> Tensor:
    results = result if isinstance(result, list) else [result]
    return sum(((part * torch.arange(part.shape[1])).sum() for part in results), torch.zeros(()))


def _negative(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    lengths[0] = -1
    return ids, lengths


@pytest.mark.parametrize("make", [Collection, Sliced, Sequences])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, lengths: (ids.where(torch.arange(len(ids)) != 7, ROWS), lengths),
        lambda ids, lengths: (ids.where(torch.arange(len(ids)) != 7, -1), lengths),
        lambda ids, lengths: (ids[:-1], lengths),
        _negative,
    ],
)
@torch.no_grad()
def test_what_eager_refuses_is_refused(make, spoil) -> None:
    model = make().eval()
    optimized = optimize(model)
    ids, lengths = torch.randint(0, ROWS, (FEATURES * 8,)), torch.full((FEATURES * 4,), 2)
    optimized(ids, lengths)
    given = spoil(ids.clone(), lengths.clone())
    errors = []
    for called in (model, optimized):
        try:
            called(*given)
        except Exception as error:
            errors.append(type(error))
    assert len(errors) in (0, 2) and (not errors or issubclass(errors[1], errors[0])), report(optimized)


def test_a_slice_beyond_the_end_is_eagers() -> None:
    class Head(nn.Module):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return x[: int(count)] * 2

    model, x = Head(), torch.randn(6)
    optimized = optimize(model)
    for count in (4, 6, 0, 9, -2):
        given = x, torch.tensor(count)
        assert optimized(*given).equal(model(*given))


class Spare(nn.Module):
    """Bags whose ids need not end with the last offset."""

    def __init__(self, mode: str, **options: object) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, 8, mode=mode, include_last_offset=True, **options) for _ in range(3)
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([bag(ids, offsets) for bag in self.bags], 1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("sum", {}),
        ("mean", {}),
        ("max", {}),
        ("sum", {"padding_idx": 2}),
        ("mean", {"padding_idx": 2}),
        ("sum", {"dtype": torch.float64}),
    ],
)
def test_ids_behind_the_last_offset_count_as_in_eager(mode: str, options: dict, grad: bool) -> None:
    model = Spare(mode, **options)
    optimized = optimize(model)
    with torch.set_grad_enabled(grad):
        for spare in (0, 3, 0, 1):
            lengths = torch.tensor([2, 0, 3, 1])
            given = torch.randint(0, ROWS, (6 + spare,)), F.pad(lengths.cumsum(0), (1, 0))
            assert optimized(*given).equal(model(*given))
    (entry,) = dispatcher_of(optimized).entries
    if mode == "sum" and not options:
        assert "fxopt.columns.default" in targets(optimized)
    elif mode == "max" and grad:
        assert "fxopt.columns.default" not in targets(optimized), "whose gradient no kernel has"
    else:
        assert "last offset" in str(entry.findings.eager_reason)
