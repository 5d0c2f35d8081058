"""Inputs of one batch in the memory of a larger one: what shares a captured graph, and what fills the rest."""

from __future__ import annotations

import pytest
import torch

from fxopt.capture.inputs import TensorSpec
from fxopt.kernels.stage.op import ONES, REPEAT, Inputs
from fxopt.patterns.row_wise import Rows
from fxopt.runtime.padding import Padding, bucket

STATE = [torch.zeros(3), torch.zeros(4)]  # placeholders 0 and 1


def spec(*dims: int | str, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec("x", dtype, torch.device("cpu"), dims)


def read(inputs: list[torch.Tensor]) -> Inputs:
    described = Inputs(len(inputs))
    described.read(inputs)
    return described


def jagged(batch: int, ids: int, width: int = 5) -> list[torch.Tensor]:
    """Dense [B, width], offsets [B], ids [N]."""
    return [torch.zeros(batch, width), torch.zeros(batch, dtype=torch.int64), torch.zeros(ids, dtype=torch.int64)]


@pytest.fixture
def padding() -> Padding:
    """Of what `jagged` gives, whose dense width may differ from call to call."""
    specs = [spec("s0", "s1"), spec("s0", dtype=torch.int64), spec("s2", dtype=torch.int64)]
    return Padding(Rows({2}, {3: 4}, set(), {4}, [1, 2, 0]), specs, len(STATE))


def test_buckets_hold_their_rows_and_at_most_a_half_more():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17)] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    for n in range(1, 5000):
        assert n <= bucket(n) <= n * 1.5 and bucket(bucket(n)) == bucket(n)


def test_rows_offsets_and_ids_have_room_and_a_filling(padding):
    inputs = jagged(5, 40)
    assert padding.batch(read(inputs)) == 5 and padding.capacity(5) == 6
    dense, offsets, ids = padding.rooms(inputs, 6, None)
    assert dense.shape == (6, 5) and dense.fill == REPEAT
    assert offsets.shape == (7,) and offsets.fill == 2, "one more, and all hold the count of input 2: of ids"
    assert ids.shape == (64,) and ids.fill == ONES
    assert padding.rooms(jagged(5, 0), 6, None)[2].shape == (16,)
    assert padding.rooms(inputs, 6, [6, 7, 96])[2].shape == (96,), "not less than the graph before had"


def test_only_ids_can_outgrow_a_graph_of_their_bucket(padding):
    capacities = [room.capacity for room in padding.rooms(jagged(5, 40), 6, None)]
    assert padding.has_room(read(jagged(6, 64)), capacities)
    assert not padding.has_room(read(jagged(5, 65)), capacities)


def test_what_is_not_padded_takes_a_graph_of_its_own(padding):
    assert list(padding.sizes(jagged(5, 40, width=7))) == [7]


def test_outputs_have_the_rows_of_the_batch(padding):
    found = padding.own_rows([torch.zeros(8, 3), torch.zeros(16), torch.zeros(4)], 5)
    assert [tuple(x.shape) for x in found] == [(5, 3), (10,), (4,)]


def test_offsets_that_end_with_the_last_have_one_entry_more_than_the_batch():
    padding = Padding(Rows(last_offsets={2}, ids={3}, outputs=[1]), [spec("s0"), spec("s1")], len(STATE))
    inputs = [torch.zeros(6, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)]
    assert padding.batch(read(inputs)) == 5
    assert [room.shape for room in padding.rooms(inputs, 6, None)] == [(7,), (16,)]


def test_without_rows_nothing_is_padded():
    padding = Padding(Rows(), [spec("s0", 5), spec("s1")], len(STATE))
    inputs = [torch.zeros(5, 5), torch.zeros(9)]
    assert padding.batch(read(inputs)) == 1 and padding.capacity(1) == 0
    assert list(padding.sizes(inputs)) == [5, 9]
    assert [room.shape for room in padding.rooms(inputs, 0, None)] == [(5, 5), (9,)]
    assert padding.has_room(read(inputs), [1, 1])
    assert [x.shape[0] for x in padding.own_rows(inputs, 1)] == [5, 9]


def test_ids_have_room_also_where_rows_are_not_padded():
    """Lengths of [F * B], dense [B, 5], and ids."""
    padding = Padding(Rows(ids={4}), [spec("s0"), spec("s1", 5), spec("s2")], len(STATE))
    inputs = [torch.zeros(6), torch.zeros(3, 5), torch.zeros(40)]
    assert padding.batch(read(inputs)) == 1 and padding.capacity(1) == 0
    assert list(padding.sizes(inputs)) == [6, 3]
    assert [room.shape for room in padding.rooms(inputs, 0, None)] == [(6,), (3, 5), (64,)]
    assert padding.has_room(read(inputs), [6, 3, 40]) and not padding.has_room(read(inputs), [6, 3, 39])
    assert [x.shape[0] for x in padding.own_rows(inputs, 1)] == [6, 3, 40]
