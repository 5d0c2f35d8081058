"""The many ways to write an embedding column, each found: one call, and as many columns as there are."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.patterns.found import Spelling, assert_eager, executable, plans

torch.manual_seed(3)
B, L, F5 = 6, 3, 5
IDS = torch.randint(0, 20, (B,))
ROWS = torch.randint(0, 20, (B, L))
FIELDS = torch.randint(0, 4, (B, F5))
X = torch.randn(B)
PACKED = torch.randint(0, 20, (B, 7)).float()
MASK = torch.randint(0, 2, (B, L)).float()
FLAT, OFFSETS = torch.randint(0, 20, (11,)), torch.tensor([0, 2, 2, 5, 9, 11])
LENGTHS = torch.randint(1, 4, (B, 1)).float()

Forward = Callable[..., Any]


def cat(*columns: Tensor) -> Tensor:
    return torch.cat(columns, 1)


PROGRAMS: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "remainder": (lambda m, i: m.e(i % 20), (IDS,)),
    "fmod": (lambda m, i: m.e(torch.fmod(i, 7)), (IDS,)),
    "floor divide": (lambda m, i: m.e(i // 3), (IDS,)),
    "div floor": (lambda m, i: m.e(torch.div(i, 3, rounding_mode="floor")), (IDS,)),
    "true divide and cast": (lambda m, i: m.e((i / 4).long()), (IDS,)),
    "clamp": (lambda m, i: m.e(i.clamp(0, 9)), (IDS,)),
    "clip": (lambda m, i: m.e(i.clip(max=9)), (IDS,)),
    "and": (lambda m, i: m.e(i & 7), (IDS,)),
    "add": (lambda m, i: m.e(i.clamp(0, 9) + 3), (IDS,)),
    "rsub": (lambda m, i: m.e(19 - i), (IDS,)),
    "where": (lambda m, i: m.e(torch.where(i > 9, 0, i)), (IDS,)),
    "where, other order": (lambda m, i: m.e(torch.where(i <= 9, i, 0)), (IDS,)),
    "where with a tensor": (lambda m, i: m.e(torch.where(i > 9, torch.zeros_like(i), i)), (IDS,)),
    "where, outside": (lambda m, i: m.e(torch.where((i < 3) | (i > 9), 0, i)), (IDS,)),
    "where, inside": (lambda m, i: m.e(torch.where((i >= 3) & (i < 9), i - 2, 0)), (IDS,)),
    "masked_fill, not inside": (lambda m, i: m.e(i.masked_fill(~((i > 2).logical_and(i < 9) & (i != 5)), 1)), (IDS,)),
    "masked_fill": (lambda m, i: m.e(i.masked_fill(i > 9, 1)), (IDS,)),
    "bucketize": (lambda m, x: m.e(torch.bucketize(x, m.edges)), (X,)),
    "bucketize right": (lambda m, x: m.e(torch.bucketize(x, m.edges, right=True)), (X,)),
    "searchsorted": (lambda m, x: m.e(torch.searchsorted(m.edges, x, side="right")), (X,)),
    "log bucket": (lambda m, x: m.e((x.abs() / 2).clamp(0, 9).sqrt().long()), (X,)),
    "int32": (lambda m, i: m.e(i.int() % 7), (IDS,)),
    "packed column": (lambda m, x: m.e(x[:, 3].long()), (PACKED,)),
    "packed slice": (lambda m, x: m.e(x[:, 3:4].long()).flatten(1), (PACKED,)),
    "unbind": (lambda m, x: m.e(x.unbind(1)[2].long()), (PACKED,)),
    "split": (lambda m, x: m.e(x.split(3, 1)[1].long()).flatten(1), (PACKED,)),
    "transposed": (lambda m, x: m.e(x.t()[2].long()), (PACKED,)),
    "offset added": (lambda m, i: m.e(i + torch.arange(F5) * 4), (FIELDS,)),
    "offset constant": (lambda m, i: m.e(i + torch.tensor([0, 4, 8, 12, 16])), (FIELDS,)),
    "index": (lambda m, i: m.w[i % 20], (IDS,)),
    "index_select": (lambda m, i: m.w.index_select(0, i % 20), (IDS,)),
    "functional": (lambda m, i: F.embedding(i % 20, m.w), (IDS,)),
    "one hot": (lambda m, i: F.one_hot(i % 20, 20).float() @ m.w, (IDS,)),
    "a row of bags": (lambda m, i, o: m.bag(i[1], o), (FLAT.expand(3, 11).contiguous(), OFFSETS)),
    "a row of weighted bags": (
        lambda m, i, o, w: m.bag(i[1], o, w[2]),
        (FLAT.repeat(3, 1), OFFSETS, torch.randn(3, 11)),
    ),
    "bag": (lambda m, i, o: m.bag(i, o), (FLAT, OFFSETS)),
    "bag mean": (lambda m, i, o: F.embedding_bag(i, m.w, o, mode="mean"), (FLAT, OFFSETS)),
    "bag max": (lambda m, i, o: F.embedding_bag(i, m.w, o, mode="max"), (FLAT, OFFSETS)),
    "bag, last offset": (
        lambda m, i, o: F.embedding_bag(i, m.w, o, mode="sum", include_last_offset=True),
        (FLAT, OFFSETS),
    ),
    "bag, padding": (lambda m, i, o: F.embedding_bag(i, m.w, o, mode="sum", padding_idx=3), (FLAT, OFFSETS)),
    "bag of rows": (lambda m, i: m.bag(i), (ROWS,)),
    "weighted bag": (
        lambda m, i, o, w: F.embedding_bag(i, m.w, o, mode="sum", per_sample_weights=w),
        (FLAT, OFFSETS, torch.rand(11)),
    ),
    "weighted bag of rows": (
        lambda m, i, w: F.embedding_bag(i, m.w, mode="sum", per_sample_weights=w),
        (ROWS, MASK + 0.5),
    ),
    "weighted bag of one feature's rows": (
        lambda m, i, w: F.embedding_bag(i[:, 1], m.w, mode="sum", per_sample_weights=w[:, 1]),
        (torch.stack([ROWS, ROWS.flip(1)], 1), torch.rand(B, 2, L)),
    ),
    "weighted bag, one feature's weights as a row": (
        lambda m, i, o, w: m.bag(i, o, w[:, 1].flatten()),
        (FLAT[:10], OFFSETS[:5], torch.rand(5, 3, 2)),
    ),
    "sum": (lambda m, i: m.e(i).sum(1), (ROWS,)),
    "sum of dim -2": (lambda m, i: m.e(i).sum(dim=-2), (ROWS,)),
    "mean": (lambda m, i: m.e(i).mean(1), (ROWS,)),
    "amax": (lambda m, i: m.e(i).amax(1), (ROWS,)),
    "max": (lambda m, i: m.e(i).max(1).values, (ROWS,)),
    "masked sum": (lambda m, i, k: (m.e(i) * k.unsqueeze(-1)).sum(1), (ROWS, MASK)),
    "masked sum, other order": (lambda m, i, k: (k[:, :, None] * m.e(i)).sum(1), (ROWS, MASK)),
    "masked sum, expanded": (lambda m, i, k: (m.e(i) * k.unsqueeze(-1).expand(-1, -1, 4)).sum(1), (ROWS, MASK)),
    "masked sum, repeated": (lambda m, i, k: (m.e(i) * k.unsqueeze(-1).repeat(1, 1, 4)).sum(1), (ROWS, MASK)),
    "bmm of the mask": (lambda m, i, k: torch.bmm(k.unsqueeze(1), m.e(i)).squeeze(1), (ROWS, MASK)),
    "masked mean": (
        lambda m, i, k: (m.e(i) * k.unsqueeze(-1)).sum(1) / (k.sum(1, keepdim=True) + 1e-8),
        (ROWS, MASK),
    ),
    "mask of the ids": (lambda m, i: (m.e(i) * (i != 0).float().unsqueeze(-1)).sum(1), (ROWS,)),
    "sum over length": (lambda m, i, n: m.e(i).sum(1) / n, (ROWS, LENGTHS)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_column_with_its_program_is_one_call(name: str) -> None:
    forward, args = PROGRAMS[name]
    model = Spelling(forward)
    made = executable(model, args)
    (plan,) = plans(made)
    assert len(plan.columns) == 1
    assert_eager(made, model, args)


NESTED_ARGS = (IDS, IDS, torch.randn(B, 4))
COLLECTED: dict[str, tuple[int, Forward, tuple[Tensor, ...]]] = {
    "cat": (2, lambda m, i, j: cat(m.e(i), m.f(j)), (IDS, IDS)),
    "cat on -1": (2, lambda m, i, j: torch.cat([m.e(i), m.f(j)], -1), (IDS, IDS)),
    "cat with a dense input": (3, lambda m, i, j, x: cat(m.e(i), x[:, 1:3], m.f(j)), (IDS, IDS, PACKED)),
    "cat of flattened rows": (2, lambda m, i, j: cat(m.e(i[:, :2]).flatten(1), m.f(j)), (ROWS, IDS)),
    "cat on the middle dim": (2, lambda m, i, j: cat(m.e(i)[:, None], m.f(j)[:, None]), (IDS, IDS)),
    "stack": (2, lambda m, i, j: torch.stack([m.e(i), m.f(j)], 1), (IDS, IDS)),
    "stacked bags, and no input of their batch size": (
        2,
        lambda m, i, o: torch.stack(
            [F.embedding_bag(i, w, o, mode="sum", include_last_offset=True) for w in (m.w, m.e.weight)], 1
        ),
        (FLAT, OFFSETS),
    ),
    "sum of columns": (2, lambda m, i, j: m.e(i) + m.f(j), (IDS, IDS)),
    "Python sum": (3, lambda m, i, j: sum([m.e(i), m.f(j), m.f(i)]), (IDS, IDS)),
    "list": (2, lambda m, i, j: [m.e(i), m.f(j)], (IDS, IDS)),
    "dict": (2, lambda m, i, j: {"a": m.e(i), "b": m.f(j).sum(1)}, (IDS, ROWS)),
    "output and collected": (3, lambda m, i, j: (m.e(i), cat(m.e(i), m.f(j))), (IDS, IDS)),
    "the same columns in two shapes": (
        2,
        lambda m, i, j: (
            cat(m.e(i), m.f(j)).relu(),
            torch.cat([m.e(i)[:, None], m.f(j)[:, None]], 1).sum(1),
        ),
        (IDS, IDS),
    ),
    "a dropped lookup": (2, lambda m, i, j: (m.e(j), cat(m.e(i), m.f(j)))[1], (IDS, IDS)),
    "tied tables": (2, lambda m, i, j: cat(m.e(i), m.e(j)), (IDS, IDS)),
    "a table that a Linear uses too": (
        2,
        lambda m, i, x: (cat(m.e(i), m.w[i]), F.linear(x, m.e.weight)),
        (IDS, torch.randn(B, 4)),
    ),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_collected_columns_share_one_call(name: str) -> None:
    count, forward, args = COLLECTED[name]
    model = Spelling(forward)
    made = executable(model, args)
    (plan,) = plans(made)
    assert len(plan.columns) == count
    assert_eager(made, model, args)


NESTED: dict[str, tuple[bool, Forward, tuple[Tensor, ...]]] = {
    "flattened": (True, lambda m, i, j, x: _beside(x, torch.cat([m.e(i)[:, None], m.f(j)[:, None]], -1)), NESTED_ARGS),
    "rows": (True, lambda m, i, j, x: _beside(x, torch.cat([m.e(i)[:, None], m.f(j)[:, None]], 1)), NESTED_ARGS),
    "as it is": (True, lambda m, i, j, x: _beside(x, torch.cat([m.e(i), m.f(j)], 1)), NESTED_ARGS),
    "read elsewhere": (False, lambda m, i, j, x: _beside_and(torch.cat([m.e(i), m.f(j)], 1), x), NESTED_ARGS),
    "interleaved": (
        False,
        lambda m, i, j, x: _beside(x[:, None], torch.cat([m.e(i), m.f(i)], -1)),
        (ROWS, *NESTED_ARGS[1:]),
    ),
}


def _beside(x: Tensor, inner: Tensor) -> Tensor:
    return torch.cat([inner.flatten(1), x[..., 1:3].flatten(1)], -1).relu()


def _beside_and(inner: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _beside(x, inner), inner.sigmoid()


@pytest.mark.parametrize("name", NESTED)
def test_a_cat_of_columns_inside_a_cat_is_written_out(name: str) -> None:
    written, forward, args = NESTED[name]
    model = Spelling(forward)
    made = executable(model, args)
    joined = [node for node in made.graph.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert bool(joined) != written
    assert_eager(made, model, args)


def test_tied_tables_are_one_table() -> None:
    (plan,) = plans(executable(Spelling(lambda m, i, j: cat(m.e(i), m.e(j))), (IDS, IDS)))
    assert {column.table for column in plan.columns} == {0}


def test_an_empty_tensor_of_one_dim_in_a_cat_is_nothing() -> None:
    def forward(m: Spelling, i: Tensor, j: Tensor) -> Tensor:
        joined = torch.FloatTensor()
        for column in (m.e(i), m.f(j), m.e(j)):
            joined = torch.cat([joined, column], 1)
        return joined

    model = Spelling(forward)
    made = executable(model, (IDS, IDS))
    assert [len(plan.columns) for plan in plans(made)] == [3]
    assert_eager(made, model, (IDS, IDS))


@pytest.mark.parametrize("ids", [ROWS, IDS])
def test_an_offset_for_the_one_field_of_each_position(ids: Tensor) -> None:
    model = Spelling(lambda m, i: cat(m.e(i.unsqueeze(-1) + torch.tensor([2]).unsqueeze(0)).squeeze(-2), m.f(i % 5)))
    made = executable(model, (ids % 9,))
    assert not any(ran.rolled_back for ran in made.findings.passes)
    assert plans(made)
    assert_eager(made, model, (ids % 9,))


def test_two_levels_are_two_calls() -> None:
    """Ids that depend on what another column gave cannot be looked up in the same call."""

    def forward(m: Spelling, i: Tensor, j: Tensor) -> Tensor:
        first = cat(m.e(i), m.f(j))
        return cat(m.e(first[:, 0].abs().long() % 20), m.f(first[:, 1].abs().long() % 20))

    model = Spelling(forward)
    made = executable(model, (IDS, IDS))
    assert [len(plan.columns) for plan in plans(made)] == [2, 2]
    assert_eager(made, model, (IDS, IDS))


def test_levels_whose_members_read_what_stands_between_them() -> None:
    """Two units over one stack of histories: a call of theirs reads views that the call before it left behind."""

    def unit(target: Tensor, history: Tensor) -> Tensor:
        target = target.unsqueeze(1).expand(-1, L, -1)
        return F.layer_norm(cat3(target, history, target - history), (3 * history.shape[-1],)).mean(1)

    def cat3(*parts: Tensor) -> Tensor:
        return torch.cat(parts, -1)

    def forward(m: Spelling, rows: Tensor, others: Tensor, i: Tensor, j: Tensor) -> Tensor:
        history = torch.cat([m.e(rows).unsqueeze(1), m.e(others).unsqueeze(1)], 1)
        target = torch.cat([m.e(i).unsqueeze(1), m.e(j).unsqueeze(1)], 1)
        return torch.cat([unit(target[:, k], history[:, k]) for k in range(2)], 1)

    model, args = Spelling(forward), (ROWS, ROWS.flip(0), IDS, IDS.flip(0))
    made = executable(model, args)
    assert not any(ran.rolled_back for ran in made.findings.passes)
    assert_eager(made, model, args)


@pytest.mark.parametrize("cast", [lambda x: x.long(), lambda x: (x.int() + 1).clamp(max=19)])
@pytest.mark.parametrize("batch", [0, 1, B])
def test_ids_that_are_cut_off_floats_are_made_inside(cast: Callable[[Tensor], Tensor], batch: int) -> None:
    """A row for each of a sequence's ids, which stand beside other features."""
    model, floats = Spelling(lambda m, x: m.e(cast(x[:, 1:4])).relu()), torch.randint(0, 19, (B, 7)).float()
    made = executable(model, (floats,))
    assert {node.target for node in made.graph.graph.nodes if node.op == "call_function"} <= {
        torch.ops.aten.slice.Tensor,
        torch.ops.fxopt.columns.default,
        operator.getitem,
        torch.ops.aten.view.default,
        torch.ops.aten.relu.default,
    }
    assert_eager(made, model, (floats[:batch],))
