"""Jagged tensors: offsets from lengths, and features that are looked up without pooling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxopt.kernels.columns import jagged, op, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.errors import explain
from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source

LENGTHS = [2, 0, 3, 0, 0, 0, 1, 4, 2]  # of three features, three bags each


def given(dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(LENGTHS, dtype=dtype)
    return lengths, torch.randint(0, 40, (int(lengths.sum()),), dtype=dtype)


def plan(segment: int, include_last: bool = True, **more) -> Plan:
    return Plan(
        (Column(Source(0), 0, 0, 0, bag=Offsets(1, include_last, segment, 3), name="a", **more),), (16,), ("float32",)
    )


@pytest.mark.parametrize("lengths", [LENGTHS, [], [0], [7]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets(lengths: list[int], dtype: torch.dtype) -> None:
    op.load()
    sizes = torch.tensor(lengths, dtype=dtype)
    ids = torch.zeros(sum(lengths))
    expected = torch.nn.functional.pad(sizes.long().cumsum(0), (1, 0))
    call = op.offsets_call_of(True)
    for found in (call(sizes, [ids, ids], True), torch.ops.fxopt.jagged_offsets(sizes, [ids], True)):
        assert found.equal(expected) and found.dtype == torch.int64
    strided = torch.stack([sizes, sizes], 1)[:, 0]
    assert call(strided, [ids], True).equal(expected)
    assert op.offsets_call_of(False)(sizes, [torch.zeros(sum(lengths) + 3)], False).equal(expected)


@pytest.mark.parametrize(
    ("lengths", "rows", "exact"),
    [([2, 3], 4, True), ([2, 3], 6, True), ([2, 3], 4, False), ([2, -1, 4], 5, True), ([-1, 1], 0, False)],
)
def test_lengths_that_do_not_fit(lengths: list[int], rows: int, exact: bool) -> None:
    op.load()
    arguments = torch.tensor(lengths), [torch.zeros(rows)], exact
    for call in (op.offsets_call_of(exact), torch.ops.fxopt.jagged_offsets, jagged.offsets):
        with pytest.raises(RuntimeError, match="jagged_offsets"):
            call(*arguments)


@pytest.mark.parametrize("segment", [0, 1, 2])
@pytest.mark.parametrize("include_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_one_feature(segment: int, include_last: bool, dtype: torch.dtype) -> None:
    lengths, ids = given(dtype)
    offsets = jagged.offsets(lengths, [ids], True)
    mine = slice(int(offsets[3 * segment]), int(offsets[3 * segment + 3]))
    table = torch.randn(40, 16)
    others = ids.clone()
    others[: mine.start], others[mine.stop :] = -1, 99  # bad ids of other features are none of this one's
    made, places = plan(segment, include_last), offsets if include_last else offsets[:-1]
    tensors = [others, places]
    for (rows,) in (op.columns(tensors, [table], encode(made)), reference.columns(tensors, [table], made)):
        assert rows.equal(table[ids[mine].long()])


def test_gradients_of_rows() -> None:
    op.load()
    lengths, ids = given()
    offsets = jagged.offsets(lengths, [ids], True)
    for dtype in (torch.float32, torch.float16):
        table = torch.randn(40, 16).to(dtype).requires_grad_()
        made = plan(2) if dtype == torch.float32 else Plan(plan(2).columns, (16,), ("float16",))
        (rows,) = torch.ops.fxopt.columns([ids, offsets], [table], encode(made))
        weight = torch.randn_like(rows)
        (found,) = torch.autograd.grad((rows * weight).sum(), table)
        (expected,) = torch.autograd.grad((table[ids[5:].long()] * weight).sum(), table)
        torch.testing.assert_close(found, expected)


def test_gradients_of_bags_in_half() -> None:
    """The reference gives them: what other features own behind the last bag is none of its own."""
    op.load()
    lengths, ids = given()
    table = torch.randn(40, 16).half().requires_grad_()
    made = Plan((Column(Source(0), 0, 0, 0, pool="sum", bag=Offsets(1, True, 0, 3)),), (16,), ("float16",))
    (bags,) = torch.ops.fxopt.columns([ids, jagged.offsets(lengths, [ids], True)], [table], encode(made))
    (found,) = torch.autograd.grad(bags.sum(), table)
    expected = torch.zeros_like(table).index_add(0, ids[:5].long(), torch.ones(5, 16).half())
    assert found.equal(expected)


def test_a_bad_id_is_named_within_its_feature() -> None:
    lengths, ids = given(torch.int64)
    ids[7] = 40
    with pytest.raises(RuntimeError) as raised:
        op.columns([ids, jagged.offsets(lengths, [ids], True)], [torch.randn(40, 16)], encode(plan(2)))
    assert "id 40 at row 2 is outside table 0 with 40 rows" in str(explain(raised.value, plan(2)))


@pytest.mark.parametrize("offsets", [[0, 5, 4], [0, 99, 100], [0, -1, 3], [0, 1], []])
def test_offsets_that_do_not_fit(offsets: list[int]) -> None:
    made = Plan((Column(Source(0), 0, 0, 0, bag=Offsets(1, True, 1, 2)),), (16,), ("float32",))
    with pytest.raises(RuntimeError):
        op.columns([torch.zeros(9, dtype=torch.int64), torch.tensor(offsets)], [torch.randn(4, 16)], encode(made))
