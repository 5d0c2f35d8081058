"""Captures that serve all lengths, though code cuts, splits or computes with them.

A dim that looks like a layout is fixed in the first capture, and is a length from its second size on.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.runtime import dispatcher_of

SIZES = ((8, 8), (3, 12), (5, 7), (1, 20), (4, 9), (2, 16), (6, 3), (7, 2), (3, 1), (0, 8), (5, 11))


class Sequence(nn.Module):
    """Lookups of a padded sequence, pooled in some way."""

    def __init__(self, pool):
        super().__init__()
        self.items, self.out, self.pool = nn.Embedding(100, 4), nn.Linear(4, 1), pool

    def forward(self, ids, *others):
        return self.out(self.pool(self.items(ids), *map(self.items, others)))


def padded(x, multiple=4):
    x = F.pad(x, (0, 0, 0, -x.shape[1] % multiple))
    return x.view(x.shape[0], -1, multiple, 4).mean(2).sum(1)


POOLS = {
    "blocks": lambda x: x.view(-1, 4).view(-1, x.shape[1] // 2, 2, 4).amax(2).sum(1),
    "padded blocks": padded,
    "chunks": lambda x: sum(part.sum(1) for part in x.chunk(2, 1)),
    "tensor_split": lambda x: sum(part.amax(1) for part in x.tensor_split(2, 1)),
    "the second and the fourth": lambda x: x[:, 1] + x[:, [3]].squeeze(1),
    "a window": lambda x: x[:, 1:3].sum(1),
    "an even length": lambda x: x.sum(1) if x.shape[1] % 2 == 0 else x.mean(1),
}


def compare(model, fast, *inputs):
    try:
        expected = model(*inputs)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            fast(*inputs)
    else:
        torch.testing.assert_close(fast(*inputs), expected, equal_nan=True)


@pytest.mark.parametrize("pool", POOLS)
def test_few_captures_for_all_lengths(pool):
    model = Sequence(POOLS[pool]).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in SIZES:
            compare(model, fast, torch.randint(0, 100, (batch, length)))
    assert len(dispatcher_of(fast).entries) <= 4  # one of them for lengths of 0, 1 or less than what is cut
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)


def test_few_captures_for_two_sequences_that_are_flattened():
    model = Sequence(lambda x, y: x.flatten(0, 1) * y.flatten(0, 1)).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in SIZES:
            compare(model, fast, *(torch.randint(0, 100, (batch, length)) for _ in range(2)))
        compare(model, fast, torch.randint(0, 100, (6, 4)), torch.randint(0, 100, (3, 8)))
    assert len(dispatcher_of(fast).entries) <= 3


def over_positions(x, y):
    return x + F.cross_entropy(x.view(-1, 4), (y[..., 0] > 0).view(-1).long())


def by_frequency(x, y):
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1) + y


def by_cell(x, y):
    rows = x.reshape(-1, 4)
    return torch.gru_cell(rows, rows, *(torch.ones(12, 4) for _ in range(2))).view(x.shape) * y


@pytest.mark.parametrize("train", [False, True], ids=["serve", "train"])
@pytest.mark.parametrize("pool", [over_positions, by_frequency, by_cell])
def test_one_capture_for_all_positions(pool, train):
    """A product of sizes that equals another is one pair of equal sizes after the other."""
    model = Sequence(pool)
    fast = fxopt.optimize(model.train(train), config=fxopt.Config(tune="off"))
    with torch.set_grad_enabled(train):
        for batch, length in [(12, 12), (5, 7), (7, 20)]:
            compare(model, fast, *(torch.randint(0, 100, (batch, length)) for _ in range(2)))
    assert len(dispatcher_of(fast).entries) == 1


def test_a_layout_that_python_counts_is_fixed_for_each_size():
    class Counts(nn.Module):
        def forward(self, x):
            return x[:, 1] * torch.tensor([*range(x.shape[1])]).sum()

    model = Counts()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for width in (5, 7, 5):
        compare(model, fast, torch.rand(3, width))
    assert [entry.executable.capture.guards.static for entry in dispatcher_of(fast).entries] == [
        (((0, 1), 7),),
        (((0, 1), 5),),
    ]


ROOT = math.sqrt  # under another name
FUNCTIONS = {
    "sqrt": lambda x: x.sum(1) / math.sqrt(x.shape[1]),
    "another name": lambda x: x.sum(1) / ROOT(x.shape[1]),
    "log": lambda x: x.sum(1) * math.log(x.shape[1] + 1),
    "log of a base": lambda x: x.sum(1) * math.log(x.shape[1] + 1, 10) * math.log(10, x.shape[1] + 2),
    "log2": lambda x: x[:, : math.ceil(math.log2(x.shape[1] + 1))].sum(1),
    "exp": lambda x: x.sum(1) * math.exp(-x.shape[1]),
    "of one another": lambda x: x.sum(1) * math.log(1 + math.sqrt(x.numel())),
    "round": lambda x: x[:, : round(math.sqrt(x.shape[1]))].sum(1),
    "fill": lambda x: x.masked_fill(x > 1, -math.sqrt(x.shape[1])).sum(1),
    "isinstance": lambda x: x.sum(1) * (2 if isinstance(math.sqrt(x.shape[1]), float) else 3),
}


@pytest.mark.parametrize("pool", FUNCTIONS)
def test_one_capture_for_functions_of_a_length(pool):
    model = Sequence(FUNCTIONS[pool]).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in (*SIZES, (3, 0)):
            compare(model, fast, torch.randint(0, 100, (batch, length)))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
    assert math.sqrt(4) == 2.0 and ROOT is math.sqrt and "sqrt" in repr(math.sqrt)


UNDEFINED = {
    "no logarithm": lambda x: x.sum(1) * (2 if x.shape[1] > 0 and math.log(x.shape[1]) > 0.5 else 3),
    "no root": lambda x: x.sum(1) * (2 if x.shape[1] > 3 and math.sqrt(x.shape[1] - 3) > 0.5 else 3),
    "too large": lambda x: x.sum(1) * (2 if x.shape[1] > 700 or math.exp(x.shape[1]) > 0.5 else 3),
}


@pytest.mark.parametrize("pool", UNDEFINED)
def test_a_guard_does_not_hold_where_a_function_has_no_value(pool):
    model = Sequence(UNDEFINED[pool]).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for length in (8, 9, 0, 2, 800):
            compare(model, fast, torch.randint(0, 100, (3, length)))


class Features(nn.Module):
    """Each of the others asks for one more trace, and the rows of the first are taken for features."""

    def forward(self, x, *others):
        k = 3 if x.shape[0] == 3 else 6
        return x.reshape(k, -1) + x + sum(other[:, -1].sum() for other in others)


def test_a_capture_ends_where_features_have_another_number():
    model = Features()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for rows in (3, 6):
        compare(model, fast, torch.rand(rows, 4), *(torch.rand(2, width) for width in range(5, 9)))


REMAINDERS = {
    "a power of two": lambda L: math.log2(L + 1) % 1 == 0,
    "of a root": lambda L: math.sqrt(L) % 1 < 0.5,
    "a half": lambda L: L / 2 % 1 == 0,
    "by a half": lambda L: L % 1.5 == 0,
    "of a number": lambda L: 7.5 % L < 1,
    "of whole ones": lambda L: L % 3 == 0,
}


@pytest.mark.parametrize("pool", REMAINDERS)
def test_a_remainder_decides_as_in_eager(pool):
    model = Sequence(lambda x: x.sum(1) if REMAINDERS[pool](x.shape[1]) else x.mean(1)).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in ((5, 13), (5, 1), (3, 9), (5, 7), (3, 8), (2, 10), (2, 3), (1, 6), (2, 7)):
            compare(model, fast, torch.randint(0, 100, (batch, length)))
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)


def test_a_branch_on_a_function_of_a_length_is_a_guard():
    model = Sequence(lambda x: x.sum(1) if math.log(x.shape[1] + 1) > 2.4 else x.mean(1)).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in SIZES:
            compare(model, fast, torch.randint(0, 100, (batch, length)))
    assert len(dispatcher_of(fast).entries) <= 3


def test_what_a_float_of_a_length_decides_is_a_guard():
    model = Sequence(lambda x: x.sum(1) / float(math.sqrt(x.shape[1]))).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in SIZES:
            compare(model, fast, torch.randint(0, 100, (batch, length)))
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)


def image(x):
    return x.transpose(1, 2)


def pairs(x):
    """The similarities of two views of a batch, as NT-Xent reads them."""
    views = torch.cat([x.sum(1), x.amax(1)])
    similar = views @ views.t()
    return x.sum(1) * torch.cat([torch.diag(similar, len(x)), similar.diagonal(-len(x))]).mean()


NUMBERED = {
    "max_pool1d": lambda x: F.max_pool1d(image(x), 2).sum(2),
    "max_pool1d in steps": lambda x: nn.MaxPool1d(3, 2, 1)(image(x)).sum(2),
    "max_pool1d of all": lambda x: F.max_pool1d(image(x), x.shape[1]).squeeze(2),
    "avg_pool1d of all": lambda x: F.avg_pool1d(image(x), kernel_size=x.shape[1]).squeeze(2),
    "max_pool2d of all": lambda x: F.max_pool2d(image(x).unsqueeze(1), (1, x.shape[1])).flatten(1),
    "avg_pool2d of all": lambda x: F.avg_pool2d(image(x).unsqueeze(1), (1, x.shape[1])).flatten(1),
    "linspace": lambda x: (x * torch.linspace(0, 1, x.shape[1]).unsqueeze(1)).sum(1),
    "diagonals": pairs,
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1)[:, -1],
    "take_along_dim from the end": lambda x: torch.take_along_dim(x, -1 - x.argsort(1), 1)[:, -1],
}


@pytest.mark.parametrize("train", [False, True], ids=["serve", "train"])
@pytest.mark.parametrize("pool", NUMBERED)
def test_one_capture_where_torch_takes_a_size_for_a_number(pool, train):
    model = Sequence(NUMBERED[pool])
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.set_grad_enabled(train):
        for batch, length in SIZES:
            ids = torch.randint(0, 100, (batch, length))
            compare(model, fast, ids)
            if train and batch and length > 1:
                expected, found = (torch.autograd.grad(m(ids).sum(), m.items.weight) for m in (model, fast))
                torch.testing.assert_close(found, expected)
    entries = dispatcher_of(fast).entries
    assert all(entry.executable is not None for entry in entries)
    assert len(entries) <= 2  # one of them for no rows


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool1d(image(x), 3, ceil_mode=True).sum(2),
        lambda x: F.max_pool1d(image(x), 2, dilation=2).sum(2),
        lambda x: F.max_pool1d(image(x), 2, return_indices=True)[0].sum(2),
        lambda x: F.avg_pool1d(image(x), x.shape[1], padding=1, count_include_pad=False).sum(2),
        lambda x: torch.take_along_dim(x, x.argsort(1)[:, :1, :1], 1).sum(1),
        lambda x: torch.linspace(0, 1, x.shape[1], dtype=torch.float64).float().sum() * x.sum(1),
    ],
)
def test_other_ways_to_take_a_size_for_a_number_are_eagers(pool):
    model = Sequence(pool)
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in SIZES:
            compare(model, fast, torch.randint(0, 100, (batch, length)))


def test_sequences_with_lengths_of_their_own_do_not_need_a_capture_for_each_answer():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.items, self.out = nn.Embedding(100, 4), nn.Linear(4, 1)

        def forward(self, *sequences):
            return self.out(sum(self.items(ids[:, -6:]).sum(1) for ids in sequences))

    model = Last().eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for lengths in itertools.product((3, 9), (4, 7), (2, 11), (5, 8)):
            compare(model, fast, *(torch.randint(0, 100, (3, length)) for length in lengths))
    assert len(dispatcher_of(fast).entries) == 5


@pytest.mark.parametrize("spaced", [torch.linspace, torch.logspace])
def test_ends_that_record_gradients_get_none(spaced):
    class Spaced(nn.Module):
        def forward(self, x):
            return (x * spaced(x.mean(), 1, 5)).sum(1)

    x = torch.randn(6, 5, requires_grad=True)
    given, expected = (torch.autograd.grad(model(x).sum(), x) for model in (fxopt.optimize(Spaced()), Spaced()))
    torch.testing.assert_close(given, expected)
