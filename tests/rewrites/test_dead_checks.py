"""dead_checks: a check that cannot matter goes, with its proof; the results are eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rewrites.dead import ALONE, Guarded, floats, ids, run

IN_100 = "ids are in [0, 100] from bucketize over 100 edges"

# A function of ids in [0, 100], and the operator that must be gone.
CHECKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda i: i.clamp(0, 100), "clamp"),
    "clip": (lambda i: torch.clip(i, 0, 200), "clip"),
    "clamp_one_sided": (lambda i: i.clamp(min=-3), "clamp"),
    "clamp_min": (lambda i: torch.clamp_min(i, 0), "clamp_min"),
    "clamp_max": (lambda i: torch.clamp_max(i, 100), "clamp_max"),
    "maximum": (lambda i: torch.maximum(i, torch.zeros_like(i)), "maximum"),
    "minimum": (lambda i: torch.minimum(torch.full_like(i, 100), i), "minimum"),
    "where_low": (lambda i: torch.where(i < 0, 0, i), "where"),
    "where_zeros": (lambda i: torch.where(i < 0, torch.zeros_like(i), i), "where"),
    "where_kept": (lambda i: torch.where(i >= 0, i, 7), "where"),
    "where_flipped": (lambda i: torch.where(torch.tensor(0) > i, 7, i), "where"),
    "where_equal": (lambda i: torch.where(i == -1, 0, i), "where"),
    "where_and": (lambda i: torch.where((i >= 0) & (i < 101), i, 0), "where"),
    "where_or": (lambda i: torch.where((i < 0) | (i > 100), 0, i), "where"),
    "where_not": (lambda i: torch.where(~(i >= 0), 0, i), "where"),
    "where_logical": (lambda i: torch.where(torch.logical_not(torch.logical_or(i < 0, i > 100)), i, 0), "where"),
    "masked_fill": (lambda i: i.masked_fill(i < 0, 0), "masked_fill"),
    "remainder": (lambda i: i % 101, "remainder"),
    "remainder_twice": (lambda i: torch.where(i % 50 % 50 % 60 < 0, 0, i), "where"),
    "fmod": (lambda i: torch.fmod(i, 101), "fmod"),
    "fmod_negative": (lambda i: torch.fmod(i, -101), "fmod"),
    "abs": (lambda i: i.abs(), "abs"),
    "relu": (lambda i: F.relu(i), "relu"),
    "floor": (lambda i: i.float().floor().long(), "floor"),
    "ceil": (lambda i: i.double().ceil().long(), "ceil"),
    "round": (lambda i: i.float().round().long(), "round"),
    "trunc": (lambda i: i.float().trunc().long(), "trunc"),
    "bit_mask": (lambda i: i & 127, "__and__"),
    "bit_mask_wide": (lambda i: i & 0xFFFF, "__and__"),
    "bit_or": (lambda i: i | 0, "__or__"),
    "nan_to_num": (lambda i: torch.nan_to_num(i.float()).long(), "nan_to_num"),
    "times_mask": (lambda i: i * (i >= 0), "mul"),
    "float_clamp": (lambda i: i.float().clamp(0.0, 100.0).long(), "clamp"),
    "filter": (lambda i: i[i >= 0], "index"),
    "masked_select": (lambda i: torch.masked_select(i, i >= 0), "masked_select"),
    "nonzero": (lambda i: i[torch.nonzero(i >= 0).squeeze(1)], "nonzero"),
    "nonzero_select": (lambda i: torch.index_select(i, 0, torch.nonzero(i >= 0).view(-1)), "nonzero"),
    "nonzero_column": (lambda i: i[torch.nonzero(i >= 0)[:, 0]], "nonzero"),
    "nonzero_tuple": (lambda i: i[torch.nonzero(i >= 0, as_tuple=True)[0]], "nonzero_numpy"),
    "where_positions": (lambda i: i[torch.where(i >= 0)[0]], "where"),
    "argwhere": (lambda i: i[torch.argwhere(i < 101).flatten()], "argwhere"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_dead_check_goes(name: str) -> None:
    check, gone = CHECKS[name]
    done = run(lambda m, x: m.emb(check(m.bucket(x))).neg())
    assert gone in done.gone
    assert done.what and all(what.endswith("removed") for what in done.what)
    assert all(done.why)


@pytest.mark.parametrize("name", CHECKS)
def test_a_result_that_leaves_the_model_is_memory_of_its_own(name: str) -> None:
    check, gone = CHECKS[name]

    def both(m: Guarded, x: Tensor) -> tuple[Tensor, Tensor]:
        i = m.bucket(x)
        return i, check(i)

    done = run(both, disables=(ALONE,))
    x = floats(40)
    with torch.no_grad():
        (i, checked), (expected, _) = done.fast(x), done.model(x)
    checked.add_(1)
    assert torch.equal(i, expected), "an edit of one result reached the other"
    assert gone in done.gone


def test_the_report_says_what_and_why() -> None:
    done = run(lambda m, x: m.emb(torch.where(m.bucket(x).clamp(0, 100) < 0, 0, m.bucket(x).clamp(0, 100))))
    assert done.what == ["clamp(0, 100) removed", "where(ids < 0, 0, ids) removed"]
    assert done.why == [IN_100, f"ids < 0 is always False: {IN_100}"]
    done = run(lambda m, x: m.emb(torch.clamp(m.bucket(x), 0, 99)))
    assert done.stays == [f"clamp(0, 99) stays: {IN_100}"]
    done = run(lambda m, x: m.emb(x.clamp(0, 100)), ids)
    assert done.stays == ["clamp(0, 100) stays: ids may be any int64"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype(dtype: torch.dtype) -> None:
    done = run(
        lambda m, x: (x % 100).clamp(0, 99).abs().masked_fill(x % 100 < 0, 5) % 120,
        lambda *shape: ids(*shape, dtype=dtype),
    )
    assert len(done.what) == 4 and done.operators == {"remainder", "clone"}


def test_uint8_is_not_negative() -> None:
    done = run(lambda m, x: m.emb(x.clamp(min=0).long().clamp(0, 255) % 101), lambda *s: ids(*s, dtype=torch.uint8))
    assert "clamp" not in done.operators


def test_masks_of_masks() -> None:
    done = run(lambda m, x: (m.bucket(x) >= 0) & (x > 0.5))
    assert "bitwise_and" not in done.operators
    done = run(lambda m, x: torch.logical_or(x > 0.5, m.bucket(x) < 0))
    assert "logical_or" not in done.operators


def test_rows_behind_dead_masks() -> None:
    def rows(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        keep = (i != -1).unsqueeze(1)
        rows = m.emb(i) * keep.float()
        rows = torch.where(keep.expand_as(rows), rows, torch.zeros_like(rows))
        return rows.masked_fill(~keep, 0.0)

    done = run(rows)
    assert len(done.what) == 3 and not {"mul", "where", "masked_fill"} & done.operators


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_filter_of_rows_and_of_matrices(dtype: torch.dtype) -> None:
    def filters(m: Guarded, x: Tensor) -> tuple[Tensor, ...]:
        i = m.bucket(x)  # [B, 5]
        keep = i[:, 0] >= 0
        return (
            x.to(dtype)[keep],
            i[i >= 0],
            torch.masked_select(i, i <= 100),
            i[:, torch.ones(5).bool()],
            i.t()[:, keep],
        )

    done = run(filters, lambda *shape: torch.randn(*shape), tail=(5,))
    assert len(done.what) >= 4 and not {"masked_select", "nonzero"} & done.operators


def test_sizes_after_a_filter_agree_with_those_before() -> None:
    def side_by_side(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        kept = m.emb(i[i >= 0])
        return torch.cat([kept.reshape(-1, 4, 2).sum(2), kept.new_ones(kept.shape[0], 1)], 1)

    done = run(side_by_side)
    assert "index" not in done.operators


def test_a_column_behind_a_filter_joins_the_others() -> None:
    done = run(lambda m, x: torch.cat([m.emb(m.bucket(x)[m.bucket(x) >= 0]), m.emb(m.bucket(x + 1))], 1))
    assert "index" not in done.operators


@pytest.mark.parametrize("spelling", ["index", "index_select", "embedding", "consecutive", "unsorted", "dim", "counts"])
@pytest.mark.parametrize("tail", [(), (3,)])
def test_unique_around_a_lookup(spelling: str, tail: tuple[int, ...]) -> None:
    if tail and spelling in ("index_select", "dim"):
        pytest.skip("takes one dim")

    def lookup(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        if spelling == "consecutive":
            u, inverse = torch.unique_consecutive(i, return_inverse=True)
        elif spelling == "counts":
            u, inverse, _ = torch.unique(i, return_inverse=True, return_counts=True)
        elif spelling == "dim":
            u, inverse = torch.unique(i, return_inverse=True, dim=0)
        else:
            u, inverse = torch.unique(i, sorted=spelling != "unsorted", return_inverse=True)
        rows = m.emb(u)
        if spelling == "index_select":
            return torch.index_select(rows, 0, inverse)
        return F.embedding(inverse, rows) if spelling == "embedding" else rows[inverse]

    done = run(lookup, tail=tail)
    assert done.what == ["unique around a lookup removed"]
    assert not {"_unique2", "unique_consecutive", "unique_dim", "index", "index_select"} & done.operators


def test_unique_in_training() -> None:
    model = run(lambda m, x: m.emb(torch.unique(m.bucket(x), return_inverse=True)[0])).model

    def lookup(m: Guarded, x: Tensor) -> Tensor:
        u, inverse = torch.unique(m.bucket(x), return_inverse=True)
        return m.emb(u)[inverse]

    from fxopt import optimize

    model.f = lookup
    fast, x = optimize(model, (floats(6),)), floats(40)
    grads = [torch.autograd.grad((net(x) ** 2).sum(), model.emb.weight)[0] for net in (model, fast)]
    torch.testing.assert_close(grads[1], grads[0])
    assert any("unique" in change.what for ran in fast._fxopt.findings[0].passes for change in ran.changes)
