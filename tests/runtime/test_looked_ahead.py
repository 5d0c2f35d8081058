"""The check of a call keeps where its tensors lie, and the kernel of the columns reads them there."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxopt
from fxopt.kernels.entry import picker
from fxopt.runtime import dispatcher_of

COLUMNS = 80


class Model(nn.Module):
    def __init__(self, before=None):
        super().__init__()
        self.before = before
        self.tables = nn.ModuleList(nn.Embedding(50 + i, 4) for i in range(COLUMNS))

    def forward(self, *ids):
        if self.before is not None:
            ids = (self.before(ids[0]), *ids[1:])
        return torch.cat([table(x) for table, x in zip(self.tables, ids, strict=True)], 1)


class Swap(nn.Module):
    """Code of a user that gives a table other memory in the middle of the call."""

    def __init__(self):
        super().__init__()
        self.moves = []  # of a table and its new rows

    def forward(self, ids):
        while self.moves:
            table, rows = self.moves.pop()
            table.weight.data = rows
        return ids.clone()


def some_ids(rows=5):
    return [torch.randint(0, 50, (rows,)) for _ in range(COLUMNS)]


def check(model, optimized, rows=5):
    ids = some_ids(rows)
    torch.testing.assert_close(optimized(*ids), model(*ids), rtol=0, atol=0)


@pytest.fixture
def served():
    model = Model()
    optimized = fxopt.optimize(model)
    with torch.no_grad():
        check(model, optimized)
    return model, optimized


@torch.no_grad()
def test_weights_that_move_between_calls(served):
    model, optimized = served
    for step in range(4):
        table = model.tables[step].weight
        table.data = torch.randn_like(table)  # other memory behind the same parameter
        check(model, optimized, rows=step)
        model.tables[step].weight = nn.Parameter(torch.randn_like(table))
        check(model, optimized, rows=step)
        table = model.tables[step].weight
        table.data = torch.randn(*reversed(table.shape)).t()  # other strides
        check(model, optimized, rows=step)
        table.share_memory_()  # other memory behind the same storage
        check(model, optimized, rows=step)


def test_gradients_on_and_off(served):
    model, optimized = served
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            check(model, optimized)
    frozen = model.requires_grad_(False)
    check(frozen, optimized)
    with torch.inference_mode():
        check(frozen, optimized)


@torch.no_grad()
def test_what_watches_operators_sees_them(served):
    model, optimized = served
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    ids = some_ids()
    with Watching():
        result = optimized(*ids)
    assert any("columns" in name or "embedding" in name for name in seen)
    torch.testing.assert_close(result, model(*ids), rtol=0, atol=0)


@torch.no_grad()
def test_an_id_outside_names_its_column(served):
    _, optimized = served
    ids = some_ids()
    ids[7][2] = 1000
    with pytest.raises(IndexError, match=r"tables\.7|index out of range"):
        optimized(*ids)


moves = []  # of a table and its new rows


@torch.library.custom_op("fxopt_tests::move_tables", mutates_args=())
def move_tables(ids: torch.Tensor) -> torch.Tensor:
    while moves:
        table, rows = moves.pop()
        table.weight.data = rows
    return ids.clone()


@move_tables.register_fake
def _(ids):
    return torch.empty_like(ids)


@torch.no_grad()
def test_an_operator_of_a_user_may_move_weights_in_the_middle():
    model = Model(torch.ops.fxopt_tests.move_tables)
    optimized = fxopt.optimize(model)
    check(model, optimized)
    for _ in range(3):
        rows, ids = torch.randn_like(model.tables[3].weight), some_ids()
        moves.append((model.tables[3], rows))
        found = optimized(*ids)
        torch.testing.assert_close(found[:, 12:16], rows[ids[3]], rtol=0, atol=0)
    assert not dispatcher_of(optimized).findings[0].eager_reason


@torch.no_grad()
def test_code_of_a_user_may_move_weights_in_the_middle():
    swap = Swap()
    model = Model(swap)
    optimized = fxopt.optimize(model, config=fxopt.Config(leaves=("before",)))
    check(model, optimized)
    for _ in range(3):
        rows, ids = torch.randn_like(model.tables[3].weight), some_ids()
        swap.moves.append((model.tables[3], rows))
        found = optimized(*ids)
        torch.testing.assert_close(found[:, 12:16], rows[ids[3]], rtol=0, atol=0)
    assert dispatcher_of(optimized).findings[0].leaves


@pytest.mark.parametrize("in_place", [False, True])
def test_picks(in_place):
    state, inputs, others = ["a", "b"], ("c", "d", "e"), ("f",)
    pick = picker([5, 0, 3, 3, 1], in_place)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            picked = pick(state, inputs, *others)
            assert list(picked) == ["f", "a", "d", "d", "b"] and len(picked) == 5 and picked[2] == "d"
            with pytest.raises(IndexError):
                pick(state, inputs)
            with pytest.raises(IndexError):
                picked[5]
            with pytest.raises((TypeError, IndexError)):
                pick(state, 3)
    with pytest.raises(IndexError):
        picker([-1], in_place)(state, inputs)
