"""Inputs of other batch sizes, made of those of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.capture import capture
from fxopt.verify.resized import resized
from fxopt.verify.segments import are_sound


@pytest.mark.parametrize(("rows", "sizes"), [(5, [1, 3]), (2, [1]), (0, [])])
def test_bags_of_other_sizes_are_bags(rows, sizes):
    """torch's embedding_bag reads behind its ids where offsets are wrong, and crashes where ids are in no bag."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, mode="max")

        def forward(self, x, ids, lengths):
            return torch.cat([self.table(x), self.bag(ids, lengths.cumsum(0) - lengths)], 1)

    x, ids, lengths = torch.randint(0, 9, (rows,)), torch.randint(0, 9, (11,)), torch.full((rows,), 11 // max(1, rows))
    model = Bags()
    graph, state = capture(model, (x, ids, lengths), {}).graph, list(model.parameters())
    assert [size for size in (0, 1, 3) if resized(graph, state, [x, ids, lengths], size)] == sizes
    if rows:  # 11 ids beside 11 rows are no rows
        assert resized(graph, state, [torch.zeros(11, dtype=torch.int64), ids, lengths], 1) is None


@pytest.mark.parametrize(("ends", "sizes"), [(True, []), (False, [3])])
def test_no_id_is_left_without_a_bag(ends, sizes):
    """torch's embedding_bag crashes on it in the backward: behind the last offset where that is the end of all."""

    class Bags(nn.Module):
        def forward(self, offsets, ids):
            starts = offsets if ends else offsets[:-1]
            return nn.functional.embedding_bag(ids, torch.ones(9, 4), starts, mode="sum", include_last_offset=ends)

    offsets, ids = torch.tensor([0, 2, 2, 7, 11]), torch.randint(0, 9, (11,))
    traced = capture(Bags(), (offsets, ids), {}).graph
    assert [size for size in (0, 1, 3, 7) if resized(traced, [], [offsets, ids], size)] == sizes
    assert are_sound(traced, [], [offsets, ids])
    assert are_sound(traced, [], [offsets[:-1], ids]) != ends


def test_bags_as_long_as_each_other_are_resized_with_their_ids():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, x, ids):
            flat = self.bag(ids, torch.arange(0, x.shape[0] * 2, 2)) if ids.dim() == 1 else self.bag(ids)
            return flat + x[:, :1]

    x, ids = torch.randn(5, 3), torch.randint(0, 9, (5, 2))
    sizes = (0, 1, 3, 7)
    model = Bags()
    graph, state = capture(model, (x, ids), {}).graph, list(model.parameters())
    assert [len(resized(graph, state, [x, ids], size)[1]) for size in sizes] == list(sizes)
    graph = capture(model, (x, ids.flatten()), {}).graph
    assert not any(resized(graph, state, [x, ids.flatten()], size) for size in sizes), (
        "ids that are not as many any more"
    )


@torch.library.custom_op("fxopt_tests::sums_of_bags", mutates_args=())
def sums_of_bags(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([bag.sum() for bag in values.split(lengths.tolist())])


@sums_of_bags.register_fake
def _(values, lengths):
    return values.new_empty(lengths.shape)


def test_operators_of_others_keep_their_integers():
    """Those of fbgemm read behind their values where lengths are wrong."""

    def bags(x, values, lengths):
        return x + sums_of_bags(values, lengths).unsqueeze(1)

    inputs = torch.randn(4, 3), torch.randint(0, 9, (6,)), torch.tensor([2, 1, 0, 3])
    graph = make_fx(bags)(*inputs)
    assert not any(resized(graph, [], inputs, size) for size in (0, 1, 8))


def test_no_row_is_cut_that_an_index_may_name_on_cuda():
    """An index outside its tensor ends the process there."""

    def picked(x, index):
        return x[index] * 2

    def looked_up(x, index):
        return x[torch.arange(len(x)).flip(0)] + torch.nn.functional.embedding(index, torch.eye(9, 3))

    for function, cut in ((picked, False), (looked_up, True)):
        inputs = torch.randn(4, 3), torch.randint(0, 4, (4,))
        graph = make_fx(function)(*inputs)
        with FakeTensorMode():
            on_cuda = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in inputs]
            assert bool(resized(graph, [], on_cuda, 1)) == cut and resized(graph, [], on_cuda, 8)
        assert resized(graph, [], inputs, 1)
