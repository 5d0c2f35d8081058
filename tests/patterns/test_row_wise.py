"""Which graphs may be padded: those whose rows do not mix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.models import E, ManyColumns, make_inputs
from fxopt import Config, optimize
from fxopt.kernels.columns.encode import plan_of
from fxopt.patterns.row_wise import NotRowWise, Rows, loose_ids, row_wise
from tests.keyed_bags import KeyedBags, keyed_inputs


def asked(question, model, *inputs, rewrites: int | None = 0):
    """Of the graph after so many rewrites: by default what the model wrote, normalized."""
    with torch.no_grad():
        config = Config(verify="off", tune="off", max_rewrites=rewrites)
        (entry,) = optimize(model.eval(), inputs, config)._fxopt.entries
    module = entry.executable.graph
    return question(module.graph, lambda call: plan_of(getattr(module, str(call.args[2].target))))


def rows_of(model, *inputs, rewrites: int | None = 0) -> Rows:
    return asked(row_wise, model, *inputs, rewrites=rewrites)


class Through(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 4)

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.softmax(1),
        lambda h: h.softmax(-1).sum(1),
        lambda h: torch.cat([h, h * 2], 1).relu(),
        lambda h: h.view(-1, 2, 2).transpose(1, 2) @ h.view(-1, 2, 2),
        lambda h: h.reshape(-1, 2).mean(1),
        lambda h: nn.functional.layer_norm(h, (4,)),
        lambda h: h - h.mean(1, keepdim=True),
    ],
)
def test_rows_that_stay_apart(function):
    found = rows_of(Through(function), torch.randn(5, 6))
    assert len(found.rows) == 1 and found.outputs[0] in (1, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h - h.mean(0),
        lambda h: h.softmax(0),
        lambda h: h.t() @ h,
        lambda h: h @ h.t(),
        lambda h: h.flip(0),
        lambda h: h / h.shape[0],
        lambda h: h.cumsum(0),
        lambda h: torch.cat([h, h]),
        lambda h: h[1:],
        lambda h: h.sum(),
        lambda h: h.transpose(0, 1).reshape(-1, 4),
        lambda h: nn.functional.layer_norm(h, h.shape),
    ],
)
def test_rows_that_mix(function):
    with pytest.raises(NotRowWise):
        rows_of(Through(function), torch.randn(5, 6))


def test_batch_norm_mixes_in_training_only():
    found = rows_of(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(5, 6))
    assert found.outputs == [1]


def test_jagged_ids_end_with_their_offsets():
    model = ManyColumns(E.scaled(12))
    found = rows_of(model, *make_inputs(model.mix, 5), rewrites=None)
    assert len(found.ids) == len(found.offsets) == 2 and set(found.offsets.values()) == found.ids
    assert len(found.rows) == model.mix.columns - 2 + 1 and found.outputs == [1]


class Steps(nn.Module):
    """Sequences of any length; a result has a row for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids):
        steps = self.table(ids).tanh()
        return steps.sum((1, 2)), steps.flatten(0, 1)


def test_a_result_with_as_many_rows_as_a_size_says_is_not_cut():
    with pytest.raises(NotRowWise):
        rows_of(Steps(), torch.randint(0, 9, (5, 3)))


def test_ids_of_bags_are_loose_where_rows_are_not():
    """By lengths of several features: as many ids as there are, while a batch keeps its size."""
    model, keyed = KeyedBags(), keyed_inputs(9)
    with pytest.raises(NotRowWise, match="offsets of several features"):
        rows_of(model, *keyed, rewrites=None)
    assert len(asked(loose_ids, model, *keyed, rewrites=None)) == 1
    assert not asked(loose_ids, KeyedBags(mean=True), *keyed, rewrites=None), "their mean is read too"
