"""Arrays and containers of any size that a forward reads, and that the user or the forward edits between calls."""

from __future__ import annotations

import array
import itertools
import types
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture.mirror import Mirror
from tests.runtime.models import assert_same, optimize

KINDS = {
    "array": lambda n: np.arange(n) % 4,
    "strided": lambda n: np.stack([np.arange(n) % 4] * 2, 1)[:, 1],
    "objects": lambda n: (np.arange(n) % 4).astype(object),
    "shared": lambda n: memoryview(bytearray(i % 4 for i in range(n))),
    "list": lambda n: [i % 4 for i in range(n)],
    "deque": lambda n: deque(i % 4 for i in range(n)),
    "dict": lambda n: {i: i % 4 for i in range(n)},
    "nested": lambda n: [[i % 4] for i in range(n)],
    "array.array": lambda n: array.array("q", (i % 4 for i in range(n))),
    "bytearray": lambda n: bytearray(i % 4 for i in range(n)),
}
SIZES = (2, 1000, 1002, 20_000)
LARGE = ("array", "strided", "objects", "array.array")  # of 200,000 numbers a model stays eager


class Reader(nn.Module):
    """Reads the first entries; a call of five rows edits one of them first, in place."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        if x.shape[0] == 5:
            edit(self.held)
        return x * number(self.held[0]) + number(self.held[1])


def number(entry):
    return entry[0] if isinstance(entry, list) else int(entry)


def edit(held):
    if isinstance(held[1], list):
        held[1][0] += 1
    else:
        held[1] += 1


@pytest.mark.parametrize(("kind", "size"), [*itertools.product(KINDS, SIZES), *((kind, 200_000) for kind in LARGE)])
def test_what_is_edited_in_place_is_seen(kind, size):
    eager = Reader(KINDS[kind](size))
    fast, recorder = optimize(Reader(KINDS[kind](size)))
    for rows in (8, 5, 8, 5, 8):
        x = torch.randn(rows, 3)
        assert_same(fast(x), eager(x))
    for held in (eager.held, fast.held):
        edit(held)
    assert_same(fast(x), eager(x))
    assert recorder.captures or size == 200_000 or kind == "shared"


def test_what_is_too_large_keeps_a_model_eager(caplog):
    fast, _ = optimize(Reader(np.arange(1 << 18)))
    fast(torch.randn(8, 3))
    assert "held holds 2,097,152 bytes, more than each call can compare" in caplog.text


def test_containers_of_many_entries_are_no_obstacle():
    """Statistics of columns, vocabularies: nobody compares those at each call; that one has become longer is seen."""
    model, x = Reader([2, 3] + [0] * 100_000), torch.randn(8, 3)
    fast, recorder = optimize(model)
    assert_same(fast(x), x * 2 + 3)
    model.held[:2] = [5, 7, 1]
    assert_same(fast(x), x * 5 + 7)
    assert recorder.captures == 2


def test_a_large_array_that_nobody_writes_is_no_obstacle():
    numbers = np.arange(1 << 18)
    numbers.setflags(write=False)
    x = torch.randn(8, 3)
    fast, recorder = optimize(Reader(numbers))
    assert_same(fast(x), x * 0 + 1)
    assert recorder.captures == 1
    written = np.arange(1 << 18)
    view = written[:]
    view.setflags(write=False)
    fast, recorder = optimize(Reader(view))
    assert_same(fast(x), x * 0 + 1)
    written[1] = 7
    assert_same(fast(x), x * 0 + 7)


TABLE = np.array([2.0, np.nan])
NAMES = {number: number for number in range(2000)}


def test_what_globals_hold_is_seen_too():
    class Global(nn.Module):
        def forward(self, x):
            if x.shape[0] == 5:
                NAMES[0] += 1
            return x * float(TABLE[0]) + NAMES[0]

    fast, recorder = optimize(Global())
    x, few = torch.randn(8, 3), torch.randn(5, 3)
    assert_same(fast(x), x * 2)
    assert recorder.captures == 1  # NaN is equal to itself here
    assert_same(fast(few), few * 2 + 1)
    assert_same(fast(x), x * 2 + 1)
    TABLE[0] = 3.0
    assert_same(fast(x), x * 3 + 1)


IDS = list[list[int]]


def test_hints_hold_nothing(caplog):
    class Hinted(nn.Module):
        def forward(self, x):
            rows: IDS = []
            rows.append(x)
            return rows[0] * 2 if IDS else list.__init__(rows)

    fast, recorder = optimize(Hinted())
    for x in torch.randn(8, 3), torch.randn(5, 3):
        assert_same(fast(x), x * 2)
    assert recorder.captures == 1 and "stays eager" not in caplog.text


class Making:
    """As of transformers: whoever reads an entry gets a new object, made of what stands there."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class MakingDict(Making, dict):
    pass


class MakingOrderedDict(Making, OrderedDict):
    pass


class MakingList(Making, list):
    pass


MADE = {
    "dict": MakingDict(relu=nn.ReLU, tanh=nn.Tanh),
    "OrderedDict": MakingOrderedDict(relu=nn.ReLU, tanh=nn.Tanh),
    "list": MakingList([nn.ReLU, nn.Tanh]),
}
ACTIVATIONS = None


@pytest.mark.parametrize("kind", MADE)
def test_containers_that_make_what_they_are_asked_for_stay_as_they_are(kind, caplog, monkeypatch):
    class Active(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = ACTIVATIONS["relu" if isinstance(ACTIVATIONS, dict) else 0]

        def forward(self, x):
            return self.first(x) * len(ACTIVATIONS)

    held = MADE[kind]
    before = list(held.values()) if isinstance(held, dict) else list.copy(held)
    monkeypatch.setitem(globals(), "ACTIVATIONS", held)
    fast, recorder = optimize(Active())
    for x in torch.randn(8, 3), torch.randn(5, 3):
        assert_same(fast(x), x.relu() * 2)
    assert recorder.captures == 1 and "stays eager" not in caplog.text
    assert (list(held.values()) if isinstance(held, dict) else list.copy(held)) == before


BACKENDS = """
_backends = {}

def rearrange(x):
    _backends.setdefault(type(x), len(_backends))
    return x.reshape(x.shape[0], -1)
"""


@pytest.mark.parametrize("library", ["einops", "of_the_user"])
def test_what_a_library_of_operators_caches_is_no_effect(library, caplog):
    module = types.ModuleType(library)
    module.__dict__["__name__"] = library
    exec(BACKENDS, vars(module))

    class Rearranged(nn.Module):
        def forward(self, x):
            return module.rearrange(x)

    x = torch.randn(8, 3, 2)
    fast, _ = optimize(Rearranged())
    assert_same(fast(x), x.flatten(1))
    assert ("changes _backends, which is not the model's own" in caplog.text) == (library == "of_the_user")


class Reading(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x):
        return self.read(self, x)


def counted(get):
    def read(model, x):
        held = get(model.held)
        held[0] += 1
        return x * float(held[0])

    return read


def by_tensor(model, x):
    torch.from_numpy(model.held).add_(1)
    return x * 2


def by_tensor_and_read(model, x):
    torch.as_tensor(model.held)[0] += 1
    return x * (1.0 if model.held[0] < 3 else 2.0)


EDITING = {
    "a tensor over it": (lambda: np.zeros(3, np.float32), by_tensor),
    "a tensor over it, and it": (lambda: np.zeros(3, np.float32), by_tensor_and_read),
    "masked": (lambda: np.ma.masked_array([0.0]), counted(lambda held: held)),
    "matrix": (lambda: np.matrix([[0.0]]), counted(lambda held: np.asarray(held)[0])),
    "proxy": (lambda: types.MappingProxyType({0: np.zeros(1)}), counted(lambda held: held[0])),
    "objects": (lambda: np.array([[0.0], None], object), counted(lambda held: held[0])),
    "structured": (lambda: np.array([(1, [0.0])], [("a", "i8"), ("b", "O")]), counted(lambda held: held["b"][0])),
    "tensor of it": (lambda: np.zeros(3, np.float32), lambda model, x: x * torch.tensor(model.held)),
}


@pytest.mark.parametrize("name", EDITING)
def test_a_forward_edits_it_as_often_as_in_eager(name):
    make, read = EDITING[name]
    eager, x = Reading(make(), read), torch.ones(4, 3)
    fast, _ = optimize(Reading(make(), read))
    for _ in range(3):
        assert_same(fast(x), eager(x))
    assert repr(eager.held) == repr(fast.held)


def test_memory_of_a_buffer_and_an_array():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = np.ones(3, np.float32)
            self.register_buffer("count", torch.from_numpy(self.held))

        def forward(self, x):
            self.count.add_(1)
            return x * float(self.held[0])

    fast, _ = optimize(Counting())
    assert [float(fast(torch.ones(1))) for _ in range(3)] == [2, 3, 4]


def test_the_form_of_an_array_is_seen_and_what_writes_behind_a_flag():
    rows = np.ones((2, 3))
    fast, _ = optimize(Reading(rows, lambda model, x: x * model.held.shape[0]))
    assert float(fast(torch.ones(1))) == 2
    rows.shape = (3, 2)
    assert float(fast(torch.ones(1))) == 3
    alias = rows[:]
    rows.setflags(write=False)
    fast, _ = optimize(Reading(rows, lambda model, x: x * float(model.held[0, 0])))
    assert float(fast(torch.ones(1))) == 1
    alias[0, 0] = 5
    assert float(fast(torch.ones(1))) == 5


def test_many_arrays_together_are_too_large():
    arrays = [np.ones(1 << 16) for _ in range(20)]
    fast, _ = optimize(Reading(arrays, lambda model, x: x * float(model.held[3][0])))
    assert float(fast(torch.ones(1))) == 1
    arrays[3][0] = 2
    assert float(fast(torch.ones(1))) == 2


def test_looks_copy_no_large_array_and_write_none():
    large, small = np.ones(1 << 18), np.ones(8)
    mirror = Mirror(lambda tensor: tensor)
    shared, copied = mirror.mirror(large), mirror.mirror(small)
    assert np.shares_memory(shared, large) and not shared.flags.writeable and large.flags.writeable
    assert not np.shares_memory(copied, small) and copied.flags.writeable
    assert mirror.same(large, shared) and mirror.same(small, copied)


def test_an_iterator_over_an_array_stays_eager():
    model = Reading(np.arange(1.0, 4.0).flat, lambda model, x: x * float(model.held[0]))
    assert float(fxopt.optimize(model, torch.ones(1))(torch.ones(1))) == 1
