"""One capture serves every size; equal sizes stay independent unless the model ties them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.capture import CaptureError, Guards, attempts, capture
from fxopt.capture.trace import trace
from fxopt.runtime import dispatcher_of

BATCHES = (0, 1, 2, 7, 4096)


class Columns(nn.Module):
    def __init__(self, columns: int = 3):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(11, 4) for _ in range(columns)])
        self.top = nn.Linear(4 * columns, 2)

    def forward(self, xs):
        columns = [table((x * 10).long()) for table, x in zip(self.tables, xs, strict=True)]
        return self.top(torch.cat(columns, -1)).relu()


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum")
        self.dense = nn.Linear(3, 4)

    def forward(self, dense, ids, offsets, weights):
        return self.dense(dense) + self.bag(ids, offsets, weights)


def bag_inputs(batch: int, count: int) -> tuple:
    offsets = torch.sort(torch.randint(0, count + 1, (batch,)))[0]
    offsets[:1] = 0
    return torch.rand(batch, 3), torch.randint(0, 50, (count,)), offsets, torch.rand(count)


@pytest.mark.parametrize("example", [1, 2, 64])
def test_every_batch_size(check, example):
    model = Columns()
    found = capture(model, ([torch.rand(example) for _ in range(3)],))
    for batch in BATCHES:
        check(found, model, [torch.rand(batch) for _ in range(3)])


class Kernel(nn.Module):
    """Slices written to, as in the recursion of an ANOVA kernel; or a tensor whose rows are one in memory."""

    def __init__(self, expanded: bool):
        super().__init__()
        self.expanded = expanded

    def forward(self, x):
        sums = torch.zeros((x.shape[0], 5)) if not self.expanded else torch.zeros(x.shape[0], 1).expand(-1, 5)
        sums[:, 1:] += x[:, 1:] * x[:, :-1]
        sums[:, :1] = x[:, 2:3]
        return sums.cumsum(1)


@pytest.mark.parametrize("example", [0, 1, 64])
def test_writing_to_slices_holds_for_every_batch_size(check, example):
    model = Kernel(expanded=False)
    found = capture(model, (torch.rand(example, 5),))
    for batch in BATCHES:
        check(found, model, torch.rand(batch, 5))


def test_writing_to_elements_that_share_memory_is_refused_as_in_eager():
    for run in (Kernel(expanded=True), lambda x: capture(Kernel(expanded=True), (x,))):
        with pytest.raises(RuntimeError, match="single memory location"):
            run(torch.rand(4, 5))


@pytest.mark.parametrize("example", [(1, 1), (1, 2), (64, 64), (5, 0)])
def test_every_multi_hot_length(check, example):
    model = Bag()
    found = capture(model, bag_inputs(*example))
    for batch, count in [(1, 0), (1, 1), (7, 2), (64, 64), (3, 4096), (0, 0)]:
        check(found, model, *bag_inputs(batch, count))


def test_batch_equal_to_the_number_of_features_stays_symbolic(check):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    found = capture(model, (torch.rand(32, 32),))
    for batch in BATCHES:
        check(found, model, torch.rand(batch, 32))


def test_padded_length_stays_symbolic(check):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 4, padding_idx=0)

        def forward(self, ids):
            mask = (ids != 0).unsqueeze(-1).float()
            return (self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)

    model = Pool()
    found = capture(model, (torch.randint(0, 20, (8, 8)),))
    for shape in [(1, 1), (3, 50), (50, 3), (0, 4)]:
        check(found, model, torch.randint(0, 20, shape))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(10, 4) for _ in range(5)])

    def forward(self, x):
        looked_up = [table(x[:, i : i + 1].long()).squeeze(1) for i, table in enumerate(self.tables)]
        return torch.cat([*looked_up, x[:, 5:8] * looked_up[0].sum(1, keepdim=True)], -1)


def test_columns_of_a_packed_matrix_are_static(check):
    model = Packed()
    found = capture(model, (torch.rand(1, 8),))
    assert found.inputs[0].dims[1] == 8 and isinstance(found.inputs[0].dims[0], str)
    assert not any("Max" in str(node.meta["val"]) for node in found.graph.graph.nodes if "val" in node.meta)
    for batch in BATCHES:
        check(found, model, torch.rand(batch, 8))
    assert not found.guards.holds([torch.rand(4, 9)])


def test_first_last_and_rest_leave_a_dim_symbolic(check):
    class Ends(nn.Module):
        def forward(self, x):
            return x[:, 0] + x[:, -1] + x[:, 1:].sum(1)

    found = capture(Ends(), (torch.rand(4, 9),))
    assert isinstance(found.inputs[0].dims[1], str)
    check(found, Ends(), torch.rand(3, 17))


def test_a_branch_on_a_size_becomes_a_guard(check):
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 10 else x + 1

    found = capture(Branch(), (torch.rand(16, 3),))
    check(found, Branch(), torch.rand(11, 3))
    assert not found.guards.holds([torch.rand(10, 3)])
    assert "x0.shape[0]" in found.guards.describe()
    small = capture(Branch(), (torch.rand(1, 3),))
    check(small, Branch(), torch.rand(10, 3))
    assert not small.guards.holds([torch.rand(11, 3)])


def test_a_branch_after_an_operator_whose_stride_questions_are_no_guards():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 1)

        def forward(self, x):
            y = self.conv(x)
            return y * 2 if y.shape[0] > 12 else y

    found = capture(Branch(), (torch.rand(16, 4, 5),))
    assert found.guards.holds([torch.rand(13, 4, 5)])
    assert not found.guards.holds([torch.rand(12, 4, 5)])


def test_squeeze_of_the_batch_is_guarded(check):
    class Squeeze(nn.Module):
        def forward(self, x):
            return (x * 2).squeeze()

    found = capture(Squeeze(), (torch.rand(8, 1),))
    assert not found.guards.holds([torch.rand(1, 1)])
    check(found, Squeeze(), torch.rand(5, 1))
    check(capture(Squeeze(), (torch.rand(1, 1),)), Squeeze(), torch.rand(1, 1))


def test_len_of_a_tensor_fixes_no_batch(check):
    class InBatch(nn.Module):
        def forward(self, u, v):
            logits = (u @ v.t()).masked_fill(torch.eye(len(u), dtype=torch.bool), -1.0)
            return F.cross_entropy(logits, torch.arange(len(v)))

    found = capture(InBatch(), (torch.rand(5, 3), torch.rand(5, 3)))
    for batch in (1, 5, 9):
        check(found, InBatch(), torch.rand(batch, 3), torch.rand(batch, 3))


def test_len_as_a_key_is_a_number():
    masks = {n: torch.ones(n, 1) for n in range(8)}

    class Cached(nn.Module):
        def forward(self, x):
            return x * masks[len(x)]

    found = capture(Cached(), (torch.rand(5, 3),))
    assert found.guards.static == (((0, 0), 5),)


def test_a_transposed_batch_of_one_is_no_constant(check):
    class Model(nn.Module):
        def forward(self, turned, ids):
            return turned.t()[:, 0] + ids[:, 1] + ids.sum(1)

    found = capture(Model(), (torch.rand(5, 1), torch.rand(1, 5)))
    for batch in BATCHES:
        check(found, Model(), torch.rand(5, batch), torch.rand(batch, 5))


def test_tied_sizes_are_guarded():
    class Add(nn.Module):
        def forward(self, a, b):
            return a + b

    found = capture(Add(), (torch.rand(4, 3), torch.rand(4, 3)))
    assert found.guards.holds([torch.rand(9, 3), torch.rand(9, 3)])
    assert not found.guards.holds([torch.rand(9, 3), torch.rand(1, 3)])
    assert not found.guards.holds([torch.rand(9, 3), torch.rand(8, 3)])
    assert "x0.shape[0] == x1.shape[0]" in found.guards.describe()


def test_broadcast_of_size_one_is_its_own_graph(check):
    class Add(nn.Module):
        def forward(self, a, b):
            return a + b

    found = capture(Add(), (torch.rand(4, 3), torch.rand(4, 1)))
    check(found, Add(), torch.rand(5, 3), torch.rand(5, 1))
    assert not found.guards.holds([torch.rand(5, 3), torch.rand(5, 3)])


def test_many_float_inputs_share_a_symbol_under_a_guard():
    model = Columns(20)
    found = capture(model, ([torch.rand(4) for _ in range(20)],))
    assert len({spec.dims for spec in found.inputs}) == 1
    assert not found.guards.holds([torch.rand(4)] * 19 + [torch.rand(5)])


def test_size_expressions_are_computed_once():
    class Sizes(nn.Module):
        def forward(self, x):
            return [F.pad(x.reshape(x.shape[0] * x.shape[1]), (0, 1)) for _ in range(4)], x.shape[0] * x.shape[1]

    found = capture(Sizes(), (torch.rand(4, 3),))
    products = [n for n in found.graph.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    assert len(products) == len({n.meta["val"].node.expr for n in products})


def test_code_that_looks_at_strides_asks_for_contiguous_inputs(check):
    class Strided(nn.Module):
        def forward(self, x):
            return x * 2 if x.is_contiguous() else x * 3

    model = Strided()
    found = capture(model, (torch.rand(4, 3),))
    check(found, model, torch.rand(5, 3))
    assert not found.guards.holds([torch.rand(3, 5).t()])
    with pytest.raises(CaptureError):
        capture(model, (torch.rand(3, 5).t(),))
    assert capture(Columns(), ([torch.rand(8)[::2] for _ in range(3)],)).guards.relations == ()


def test_code_that_asks_for_gradients_is_captured_for_each_answer():
    class Asking(nn.Module):
        def forward(self, x):
            return x * 2 if x.requires_grad else x * 3

    found = capture(Asking(), (torch.rand(4, 3),))
    assert found.guards.holds([torch.rand(5, 3)]) and not found.guards.holds([torch.rand(5, 3, requires_grad=True)])
    found = capture(Asking(), (torch.rand(4, 3, requires_grad=True),))
    assert not found.guards.holds([torch.rand(5, 3)]) and found.guards.holds([torch.rand(5, 3, requires_grad=True)])


@pytest.mark.parametrize("rows", [1, 4])
def test_whether_a_reshape_requires_gradients_is_not_taken_from_one_size(rows):
    """Without gradients a view of what requires them does, and a copy does not."""

    class Asking(nn.Module):
        def __init__(self, reshape):
            super().__init__()
            self.reshape = reshape

        def forward(self, x):
            y = self.reshape(x)
            return x * 2 if y.requires_grad else x * 3

    given = torch.rand(rows, 3, requires_grad=True)
    with torch.no_grad():
        for reshape in (lambda x: x.mT.reshape(x.shape), lambda x: x[:, :2].split(1, 1)[0].t().flatten()):
            with pytest.raises(CaptureError, match="requires_grad"):
                capture(Asking(reshape), (given,))
        found = capture(Asking(lambda x: x.reshape(-1)), (given,))
        assert found.guards.holds([torch.rand(5, 3, requires_grad=True)])
        assert not found.guards.holds([torch.rand(3, 5, requires_grad=True).t()])
        capture(Asking(lambda x: x.mT.reshape(x.shape) + 1), (given,))
    capture(Asking(lambda x: x.mT.reshape(x.shape)), (given,))


def test_what_reads_a_tensor_does_not_read_a_contiguous_copy_of_it():
    class Edits(nn.Module):
        def forward(self, x):
            x.contiguous().add_(1)
            return x * 2, x.contiguous(), x

    graph = capture(Edits(), (torch.rand(4, 3),)).graph
    for inputs in (torch.rand(4, 3), torch.rand(3, 4).t()):
        expected, found = inputs.clone(), inputs.clone()
        wanted, results = Edits()(expected), graph(found)
        assert torch.equal(found, expected) and all(map(torch.equal, results, wanted))
        assert results[2] is found and (results[1] is found) == (wanted[1] is expected)


@pytest.mark.parametrize("example", [0, 1, 4])
def test_a_branch_on_an_empty_batch_is_a_guard(check, example):
    class Empty(nn.Module):
        def forward(self, x):
            return x.sum() + 5 if x.shape[0] == 0 else x / max(x.shape[0], 1)

    found = capture(Empty(), (torch.rand(example, 3),))
    check(found, Empty(), torch.rand(example, 3))
    assert not found.guards.holds([torch.rand(4 if example == 0 else 0, 3)])


def test_strides_that_only_the_trace_reads_ask_nothing_of_the_inputs(check):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.Linear(3, 3)
            self.leaf.register_forward_hook(lambda module, args, out: None)
            self.plain = torch.rand(3)

        def forward(self, x):
            y = self.leaf(x) + self.plain + torch.tensor([1.0, 2.0, 3.0])
            return y[torch.arange(x.shape[0])], torch.as_tensor(2.5) * y.new_tensor([1.0])

    model = Constants()
    found = capture(model, (torch.rand(3, 5).t(),))
    assert found.guards.relations == ()
    check(found, model, torch.rand(7, 3))


def test_conditions_that_always_hold_or_follow_from_others_are_dropped():
    class Rows(nn.Module):
        def forward(self, x):
            for size in (0, 1, 2):
                assert x.shape[0] > size
            assert x.shape[0] >= 0
            return x[2] + x[1]

    found = capture(Rows(), (torch.rand(5, 3),))
    assert found.guards.relations == ("s10 >= 3",)
    assert not found.guards.holds([torch.rand(2, 3)]) and found.guards.holds([torch.rand(3, 3)])


@pytest.mark.parametrize("forward", [lambda x: x[:, 1], lambda x: x[:, 0] + x[:, 1:].sum(1)], ids=["packed", "ends"])
def test_many_inputs_alike_need_few_traces(check, monkeypatch, forward):
    class Each(nn.Module):
        def forward(self, xs, length):
            return torch.stack([forward(x) for x in xs], 1), length.sum(1)

    traces = []
    monkeypatch.setattr(attempts, "trace", lambda *args: traces.append(1) or trace(*args))
    inputs = [torch.rand(4, 6) for _ in range(50)], torch.rand(4, 7)
    found = capture(Each(), inputs)
    assert len(traces) <= 6
    check(found, Each(), [torch.rand(9, 6) for _ in range(50)], torch.rand(9, 0))


def test_a_relation_that_divides_by_a_size_of_zero_does_not_hold() -> None:
    guards = Guards(relations=("12 % s0 == 0",), sources=(("s0", (0, 0)),))
    assert [guards.holds([torch.rand(size)]) for size in (0, 4, 5)] == [False, True, False]


@pytest.mark.parametrize(
    "pick",
    [
        lambda z: z[:, [1, 2, 2], [0, 0, 1]],
        lambda z: z[:, torch.tensor([1, 2, 2]), torch.tensor([0, 0, 1])],
        lambda z: z[(slice(None), *torch.tril_indices(3, 3, -1))],
        lambda z: z.flatten(1).index_select(1, torch.tensor([3, 6, 7])),
    ],
)
def test_dims_that_are_indexed_at_fixed_places_are_a_layout(pick):
    class Dots(nn.Module):
        def forward(self, x, lengths):
            last = x[torch.arange(x.shape[0]), lengths]
            return pick(torch.bmm(x, x.transpose(1, 2))), last

    captured = capture(Dots(), (torch.randn(5, 3, 4), torch.randint(0, 3, (5,))))
    assert captured.inputs[0].dims[1] == 3


def test_dims_that_are_indexed_by_data_stay_lengths():
    class Last(nn.Module):
        def forward(self, x, lengths):
            return x[torch.arange(x.shape[0]), lengths - 1]

    captured = capture(Last(), (torch.randn(5, 3, 4), torch.randint(1, 3, (5,))))
    assert not isinstance(captured.inputs[0].dims[1], int)


@pytest.mark.parametrize("part", [lambda n: int(n * 0.5), lambda n: int(n**0.5), lambda n: math.ceil(n * 0.3)])
def test_a_size_by_a_float_is_a_guard_or_a_term(check, part):
    class First(nn.Module):
        def forward(self, x):
            return x[: part(x.shape[0])] * 2

    captured = capture(First(), (torch.randn(4, 3),))
    check(captured, First(), torch.randn(4, 3))
    for rows in range(12):
        x = torch.randn(rows, 3)
        assert not captured.guards.holds([x]) or captured.graph(x)[0].shape == First()(x).shape


class Attention(nn.Module):
    """Of a sequence, with what `how` cuts from it."""

    def __init__(self, how):
        super().__init__()
        self.items, self.projections, self.out = nn.Embedding(100, 16), nn.Linear(16, 48), nn.Linear(16, 1)
        self.positions = nn.Embedding(40, 16)
        self.register_buffer("mask", torch.ones(40, 40, dtype=torch.bool).tril())
        self.how = how

    def heads(self, ids):
        batch, length = ids.shape
        x = self.items(ids) + self.positions.weight[:length]
        q, k, v = (part.reshape(batch, length, 2, -1).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        scores = (q @ k.mT).masked_fill(~self.mask[:length, :length], -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)

    def forward(self, ids):
        return self.out(self.how(self, ids, self.heads(ids)))


CUT = {
    "all": lambda m, ids, y: y.sum(1),
    "the first": lambda m, ids, y: y[:, :1].squeeze(1),
    "the first as a target": lambda m, ids, y: (y * m.items(ids[:, :1])).sum(1),
    "the first three": lambda m, ids, y: y.narrow(1, 0, 3).flatten(1)[:, :16],
    "all but the first three": lambda m, ids, y: y[:, 3:].sum(1),
    "what was joined": lambda m, ids, y: torch.split(torch.cat([y, y[:, :2]], 1), [ids.shape[1], 2], 1)[0].sum(1),
    "the last three": lambda m, ids, y: y[:, -3:].flatten(1)[:, -16:],
    "the last three but one": lambda m, ids, y: y[:, -3:-1].flatten(1)[:, :16],
    "narrow from the end": lambda m, ids, y: y.narrow(1, -3, 3).flatten(1)[:, 8:24],
    "halves": lambda m, ids, y: torch.stack(halves(y), 0).sum(0),
    "the largest half": lambda m, ids, y: y.topk(y.shape[1] // 2, 1).values.sum(1),
    "merged": lambda m, ids, y: y.swapaxes(1, 2).reshape(-1, 16, ids.shape[1]).sum(2),
}


def halves(y):
    half = y.shape[1] // 2
    return [part.sum(1) for part in y.split([half, y.shape[1] - half], 1)]


@pytest.mark.parametrize("how", CUT)
def test_one_capture_for_every_length(how):
    model = Attention(CUT[how]).eval()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    with torch.no_grad():
        for batch, length in ((8, 9), (3, 12), (1, 20), (5, 4), (2, 40)):
            ids = torch.randint(0, 100, (batch, length))
            torch.testing.assert_close(fast(ids), model(ids))
        assert len(dispatcher_of(fast).entries) == 1
        for batch, length in ((3, 2), (3, 1), (0, 9), (2, 41)):  # fewer than are cut, and more than there are positions
            ids = torch.randint(0, 100, (batch, length))
            try:
                expected = model(ids)
            except (RuntimeError, IndexError) as error:
                with pytest.raises(type(error)):
                    fast(ids)
            else:
                torch.testing.assert_close(fast(ids), expected)


class NextIds(nn.Module):
    """The loss of a language model, whose first dims are merged in one way or another."""

    def __init__(self, how):
        super().__init__()
        self.items, self.how = nn.Embedding(50, 8), how

    def forward(self, ids):
        scores, targets = self.items(ids[:, :-1]) @ self.items.weight.t(), ids[:, 1:]
        if self.how == "classes in dim 1":
            return F.cross_entropy(scores.transpose(1, 2), targets)
        if self.how == "flatten":
            return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


@pytest.mark.parametrize("how", ["classes in dim 1", "flatten", "reshape"])
def test_one_capture_for_every_length_of_a_loss(how):
    model = NextIds(how)
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for batch, length in ((8, 9), (3, 12), (4, 20), (5, 4)):
        ids = torch.randint(0, 50, (batch, length))
        torch.testing.assert_close(fast(ids), model(ids))
    assert len(dispatcher_of(fast).entries) == 1
    for batch, length in ((1, 9), (3, 2)):
        ids = torch.randint(0, 50, (batch, length))
        torch.testing.assert_close(fast(ids), model(ids))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids, mask):
        return (self.table(ids) * mask).sum(1)


class Scored(nn.Module):
    def forward(self, user, items):
        return (user * items).sum(-1) + user.mean()


class Neighbours(nn.Module):
    """A session as a graph: the edges in and out lie beside each other."""

    def forward(self, items, edges):
        nodes = edges.shape[1]
        return edges[:, :, :nodes] @ items + edges[:, :, nodes : 2 * nodes] @ items


class Broadcast(nn.Module):
    def forward(self, x, y, z):
        return (x + y) * z


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Masked(), lambda b, n: (torch.randint(0, 10, (b, n)), torch.rand(b, n, 1))),
        (Scored(), lambda b, n: (torch.rand(b, 1, 4), torch.rand(b, n, 4))),
        (Scored(), lambda b, n: (torch.rand(1, 1, 4), torch.rand(b, n, 4))),
        (Neighbours(), lambda b, n: (torch.rand(b, n, 4), torch.rand(b, n, 2 * n))),
        (Broadcast(), lambda b, n: (torch.rand(b, n, 1), torch.rand(b, 1, 5), torch.rand(n, 5))),
        (Broadcast(), lambda b, n: (torch.rand(b, 1), torch.rand(1, n), torch.rand(b, n))),
    ],
    ids=["mask", "items of a user", "one user for all", "edges of a graph", "three tensors", "rows and columns"],
)
def test_one_capture_for_every_length_beside_dims_of_one(model, inputs):
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for batch, length in ((4, 5), (3, 7), (2, 6), (8, 4), (5, 2), (9, 3)):
        given = inputs(batch, length)
        torch.testing.assert_close(fast(*given), model(*given))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None


def test_a_packed_matrix_cut_in_two():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables, self.dense = nn.ModuleList(nn.Embedding(9, 4) for _ in range(5)), nn.Linear(3, 4)

        def forward(self, x):
            ids = x[:, 3:].long()
            return torch.cat([self.dense(x[:, :3]), *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)

    model = Packed()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for batch in (4, 1, 7):
        x = torch.cat([torch.randn(batch, 3), torch.randint(0, 9, (batch, 5))], 1)
        torch.testing.assert_close(fast(x), model(x))
    assert len(dispatcher_of(fast).entries) == 1
    assert any(ran.name == "embedding_columns" and ran.changes for ran in dispatcher_of(fast).findings[0].passes)


def test_whether_a_size_divides_is_a_condition():
    class PadsToFour(nn.Module):
        def forward(self, x):
            fours = x.shape[1] / 4
            if not fours.is_integer():
                x = F.pad(x, (0, 0, 0, math.ceil(fours) * 4 - x.shape[1]))
            return x.reshape(x.shape[0], -1, 4, 3).mean(2)

    model = PadsToFour()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    for length in (7, 8, 9, 16, 12, 20):
        x = torch.randn(3, length, 3)
        torch.testing.assert_close(fast(x), model(x))
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)
    assert len(dispatcher_of(fast).entries) <= 3
