"""Optimizers that step in backward: against their formulas in fp64, in every way a gradient can come."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt import optimizers
from fxopt.kernels.columns import row_gradients
from fxopt.kernels.row_update import op as row_update
from fxopt.patterns.embedding_columns import columns

R, D = 40, 6
OPTIONS = {
    optimizers.SGD: {"lr": 0.1},
    optimizers.RowwiseAdagrad: {"lr": 0.1, "eps": 1e-6},
    optimizers.Adam: {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6},
}
every = pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)


class Tables(nn.Module):
    """Lookups, bags, padding and a table that three columns share, in front of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(R, D)
        self.padded = nn.Embedding(R, D, padding_idx=3)
        self.sum = nn.EmbeddingBag(R, D, mode="sum")
        self.mean = nn.EmbeddingBag(R, D, mode="mean", padding_idx=2)
        self.most = nn.EmbeddingBag(R, D, mode="max")
        self.out = nn.Linear(7 * D, 1)

    def forward(self, ids: Tensor, bag: Tensor, offsets: Tensor) -> Tensor:
        looked_up = [self.shared(ids[:, 0]), self.shared(ids[:, 1]), self.shared(ids[:, 2]), self.padded(ids[:, 1])]
        pooled = [bags(bag, offsets) for bags in (self.sum, self.mean, self.most)]
        return self.out(torch.cat(looked_up + pooled, 1))


def batch(seed: int, rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (rows,), generator=generator)  # of bags, empty ones too
    ids, bag = (torch.randint(0, R, shape, generator=generator) for shape in ((rows, 3), (int(lengths.sum()),)))
    return ids, bag, lengths.cumsum(0) - lengths


class Reference:
    """The formulas, on dense gradients in fp64."""

    def __init__(self, kind: type, tables: list[nn.Parameter]) -> None:
        self.kind, self.options, self.step = kind, OPTIONS[kind], 0
        self.tables = tables
        self.state = [(torch.zeros(len(t)).double(), torch.zeros_like(t), torch.zeros_like(t)) for t in tables]

    @torch.no_grad()
    def __call__(self) -> None:
        self.step += 1
        for table, (s, m, v) in zip(self.tables, self.state, strict=True):
            for r in range(len(table)):
                g = table.grad[r]
                if g.any():
                    self.update(table[r], g, s, m[r], v[r], r)
            table.grad = None

    def update(self, w: Tensor, g: Tensor, s: Tensor, m: Tensor, v: Tensor, r: int) -> None:
        lr = self.options["lr"]
        if self.kind is optimizers.SGD:
            w -= lr * g
        elif self.kind is optimizers.RowwiseAdagrad:
            s[r] += g.square().mean()
            w -= lr * g / (s[r].sqrt() + self.options["eps"])
        else:
            b1, b2 = self.options["betas"]
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            w -= lr * (m / (1 - b1**self.step)) / ((v / (1 - b2**self.step)).sqrt() + self.options["eps"])


def models() -> tuple[Tables, Tables]:
    torch.manual_seed(0)
    model = Tables()
    return model, copy.deepcopy(model).double()


def assert_close(model: nn.Module, exact: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@every
@pytest.mark.parametrize("eager", [False, True], ids=["fxopt", "eager"])
def test_steps_follow_the_formula(kind, eager):
    model, exact = models()
    run = model if eager else fxopt.optimize(model, config=fxopt.Config(tune="off"))
    tables, others = optimizers.split(model)
    assert len(tables) == 5 and len(others) == 2
    kind(tables, **OPTIONS[kind])
    reference = Reference(kind, optimizers.split(exact)[0])
    for seed, rows in enumerate((12, 7, 1, 0, 12)):
        inputs = batch(seed, rows)
        run(*inputs).square().sum().backward()
        assert all(table.grad is None for table in tables)
        if rows:  # eager has no gradients of a max over no bags
            exact(*inputs).square().sum().backward()
            reference()
        elif kind is optimizers.Adam:
            reference.step += 1
        assert_close(model, exact)


@pytest.mark.gpu
@every
def test_steps_on_a_gpu(kind):
    model, exact = models()
    fast = fxopt.optimize(model.cuda(), config=fxopt.Config(tune="off"))
    kind(optimizers.split(model)[0], **OPTIONS[kind])
    reference = Reference(kind, optimizers.split(exact)[0])
    for seed, rows in enumerate((12, 7, 1, 300)):
        inputs = batch(seed, rows)
        fast(*(tensor.cuda() for tensor in inputs)).square().sum().backward()
        exact(*inputs).square().sum().backward()
        reference()
        assert_close(copy.deepcopy(model).cpu(), exact)


class Lookups(Tables):
    """What a gradient needs no answer of the device for."""

    def forward(self, ids: Tensor, bag: Tensor, offsets: Tensor) -> Tensor:
        fields = [self.shared(ids[:, 0]), self.padded(ids[:, 1]), self.shared(ids[:, 2]), self.sum(bag, offsets)]
        return torch.cat(fields, 1) @ self.out.weight[0, : 4 * D]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.RowwiseAdagrad, optimizers.Adam])
def test_a_whole_step_is_captured(kind):
    torch.manual_seed(0)
    model = Lookups().cuda()
    exact = copy.deepcopy(model)
    inputs = [tensor.cuda() for tensor in batch(0, 40)]
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    kind(optimizers.split(model)[0], **OPTIONS[kind])
    kind(optimizers.split(exact)[0], **OPTIONS[kind])

    def step() -> None:
        fast(*inputs).square().sum().backward()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if kind is optimizers.Adam:
        with pytest.raises(RuntimeError, match="counts its steps"), torch.cuda.graph(graph):
            step()
        return
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
    for _ in range(5):
        exact(*inputs).square().sum().backward()
    assert_close(model.cpu(), exact.cpu().double())


def test_the_package_has_them_without_an_import_of_their_own():
    script = "import fxopt, sys; assert 'fxopt.optimizers' not in sys.modules; fxopt.optimizers.SGD"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).resolve().parents[1])


def test_the_rows_are_those_of_the_dense_gradient():
    model, _ = models()
    fast, (tables, _) = fxopt.optimize(model, config=fxopt.Config(tune="off")), optimizers.split(model)
    loss = fast(*batch(0)).square().sum()
    dense = torch.autograd.grad(loss, tables, retain_graph=True)
    for table in tables:
        row_gradients.want(table)
    sparse = torch.autograd.grad(loss, tables)
    assert [grad.is_sparse for grad in sparse] == [True, True, True, True, False]  # maxima are PyTorch's
    for table, a, b in zip(tables, sparse[:4], dense, strict=False):
        rows = a._indices()[0]
        assert row_gradients._found[table][1].data_ptr() == rows.data_ptr()  # or others might come to lie there
        assert a.is_coalesced() and (rows[1:] > rows[:-1]).all() and len(rows) < R
        assert torch.equal(a.to_dense(), b)


@every
def test_two_calls_in_one_backward_are_one_step(kind):
    model, exact = models()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    kind(optimizers.split(model)[0], **OPTIONS[kind])
    reference = Reference(kind, optimizers.split(exact)[0])
    for run in (fast, exact):
        loss = (
            run(*batch(0)).square().sum() + run(*batch(1)).sum() + run.shared.weight[:9].square().sum()
        )  # and by hand
        loss.backward()
    reference()
    assert_close(model, exact)


def test_a_table_that_a_nested_backward_steps_has_steps_of_its_own():
    torch.manual_seed(0)
    a, b = nn.Embedding(10, 4).double(), nn.Embedding(10, 4).double()
    optimizers.Adam([a.weight, b.weight], lr=0.1, eps=1e-12)
    before = b.weight.detach().clone()
    x = torch.ones(4, requires_grad=True, dtype=torch.double)
    nested = checkpoint(lambda x: a(torch.tensor([1, 2])) * x, x, use_reentrant=True)
    outer = b(torch.tensor([3, 4])) + a(torch.tensor([5, 6]))
    (nested.square().sum() + outer.square().sum()).backward()
    torch.testing.assert_close((before - b.weight)[3:5].abs(), torch.full((2, 4), 0.1, dtype=torch.double))


@pytest.mark.parametrize("most", [0, 1 << 26])
def test_gradients_may_wait_or_not(monkeypatch, most):
    monkeypatch.setattr(optimizers, "_MOST_BYTES", most)
    test_two_calls_in_one_backward_are_one_step(optimizers.RowwiseAdagrad)


@every
def test_a_saved_state_goes_on(kind):
    runs = []
    for saved_after in (None, 2):
        model, _ = models()
        fast = fxopt.optimize(model, config=fxopt.Config(tune="off", verify="off"))
        optimizer = kind(optimizers.split(model)[0], **OPTIONS[kind])
        for step in range(4):
            if step == saved_after:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.detach()
                optimizer = kind(optimizers.split(model)[0], lr=99)
                optimizer.load_state_dict(state)
            fast(*batch(step)).square().sum().backward()
        runs.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_learning_rate_may_change():
    model, exact = models()
    optimizer = optimizers.SGD(optimizers.split(model)[0], lr=0.0)
    theirs = torch.optim.SGD(optimizers.split(exact)[0], lr=0.5)
    before = copy.deepcopy(model.state_dict())
    model(*batch(0)).sum().backward()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    optimizer.param_groups[0]["lr"] = 0.5
    for run in (model, exact):
        run(*batch(0)).sum().backward()
    theirs.step()
    optimizer.step()
    optimizer.zero_grad()
    assert_close(model, exact)


def test_adam_is_sparse_adam():
    """But for eps, which SparseAdam adds before the correction."""
    ours, theirs = (nn.Embedding.from_pretrained(torch.ones(R, D), freeze=False, sparse=True) for _ in range(2))
    optimizers.Adam(ours.parameters(), lr=0.1, eps=0)
    sparse = torch.optim.SparseAdam(theirs.parameters(), lr=0.1, eps=1e-20)
    for seed in range(4):
        ids = batch(seed)[0]
        for table in (ours, theirs):
            (table(ids).sum(1) * torch.arange(1, D + 1)).square().sum().backward()
        sparse.step()
        sparse.zero_grad()
        torch.testing.assert_close(ours.weight, theirs.weight)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_its_reference(kind, dtype):
    assert row_update.OPERATORS.compiled()
    torch.manual_seed(0)
    rows, grads = torch.tensor([0, 3, 4, 17, 38]), torch.randn(5, 19, dtype=dtype)
    grads[2] = 0
    numbers = row_update.constants(0.1, 1e-3, (0.9, 0.99), 3)
    found = []
    for function in (torch.ops.fxopt.row_update, row_update.row_update):
        torch.manual_seed(1)
        table, m, v = (torch.rand(R, 19, dtype=dtype) for _ in range(3))
        state = {optimizers.SGD: [], optimizers.RowwiseAdagrad: [m[:, 0].clone()], optimizers.Adam: [m, v]}[kind]
        other, its_state = table[:7] + 1, [each[:7] + 1 for each in state]
        few = rows[:3], grads[:3]
        function([table, other], [*state, *its_state], [rows, few[0]], [grads, few[1]], numbers, kind.kind)
        found.append([table, *state, other, *its_state])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [[-1], [R], [4, 4], [5, 4]])
def test_rows_that_do_not_grow_within_the_table_are_refused(rows):
    assert row_update.OPERATORS.compiled()
    table, numbers = torch.ones(R, D), row_update.constants(0.1)
    with pytest.raises(RuntimeError, match="growing rows below 40"):
        torch.ops.fxopt.row_update([table], [], [torch.tensor(rows)], [torch.ones(len(rows), D)], numbers, 0)
    assert (table == 1).all()


def test_what_is_refused(monkeypatch):
    table = nn.Embedding(R, D)
    for wrong in (nn.Parameter(torch.ones(D)), nn.Parameter(table.weight.detach().half()), torch.ones(R, D)):
        with pytest.raises(ValueError, match="expected contiguous"):
            optimizers.SGD([wrong])
    with pytest.raises(ValueError, match="listed twice"), pytest.warns(UserWarning, match="duplicate"):
        optimizers.SGD([table.weight, table.weight])
    optimizer = optimizers.SGD(table.parameters(), lr=0.5)
    with pytest.raises(ValueError, match="already"):
        optimizers.Adam(table.parameters())
    with pytest.raises(RuntimeError, match="create_graph"):
        table(torch.tensor([1])).square().sum().backward(create_graph=True)
    monkeypatch.setattr(optimizers, "_ranks", lambda: 2)
    table.weight.grad = None
    with pytest.raises(RuntimeError, match="ranks"):
        table(torch.tensor([1])).sum().backward()
    table.weight._ddp_ignored = True
    table.weight.grad = None
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    assert torch.equal(table.weight[1], before[1] - 0.5) and torch.equal(table.weight[2:], before[2:])
    optimizer.detach()
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None and torch.equal(table.weight[1], before[1] - 0.5)


def test_a_second_backward_sees_that_the_tables_changed(monkeypatch):
    """Where a gradient reads them, as that of a maximum does."""
    monkeypatch.setattr(columns, "_without_kernel", lambda column: "")
    model, _ = models()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    optimizers.SGD(optimizers.split(model)[0], lr=0.1)
    loss = fast(*batch(0)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copy_steps_by_hand():
    model, exact = models()
    optimizer = optimizers.SGD(optimizers.split(model)[0], lr=0.5)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    copied(*batch(0)).sum().backward()
    its_optimizer.step()
    exact(*batch(0)).sum().backward()
    torch.optim.SGD(optimizers.split(exact)[0], lr=0.5).step()
    assert_close(copied, exact)


def test_applied_by_torch():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, exact = models()
    _apply_optimizer_in_backward(optimizers.SGD, optimizers.split(model)[0], {"lr": 0.5})
    theirs = torch.optim.SGD(optimizers.split(exact)[0], lr=0.5)
    for run in (fxopt.optimize(model, config=fxopt.Config(tune="off")), exact):
        run(*batch(0)).square().sum().backward()
    theirs.step()
    assert_close(model, exact)


def on_the_gradient(table):
    table.register_hook(lambda grad: grad.clamp(-0.1, 0.1))  # not for sparse ones


def on_its_node(table):
    node = torch.autograd.graph.get_gradient_edge(table).node
    node.register_prehook(lambda grads: tuple(3 * grad for grad in grads))


@pytest.mark.parametrize("hang", [on_the_gradient, on_its_node])
def test_hooks_change_the_gradient(hang):
    model, exact = models()
    optimizers.SGD(optimizers.split(model)[0], lr=0.5)
    theirs = torch.optim.SGD(optimizers.split(exact)[0], lr=0.5)
    for run in (fxopt.optimize(model, config=fxopt.Config(tune="off")), exact):
        hang(run.shared.weight)
        run(*batch(0)).square().sum().backward()
    theirs.step()
    assert_close(model, exact)


@pytest.mark.filterwarnings("error")
def test_schedulers_know_that_there_was_a_step():
    table = nn.Embedding(R, D)
    optimizer = optimizers.SGD(table.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        before = table.weight.detach().clone()
        table(torch.tensor([1])).sum().backward()
        scheduler.step()
        assert torch.equal(table.weight[1], before[1] - 0.5**step)


def test_a_table_frozen_after_the_forward_stays():
    model, _ = models()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    optimizers.SGD(optimizers.split(model)[0], lr=0.5)
    before, others = model.shared.weight.detach().clone(), model.padded.weight.detach().clone()
    loss = fast(*batch(0)).square().sum()
    model.shared.weight.requires_grad_(False)
    loss.backward()
    assert torch.equal(model.shared.weight, before) and not torch.equal(model.padded.weight, others)


@every
def test_what_else_a_backward_is_asked_for(kind):
    """Gradients by torch.autograd.grad, of other parameters alone, and beside one that lies in `.grad` already."""
    model, exact = models()
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    (tables, others), its_tables = optimizers.split(model), optimizers.split(exact)[0]
    kind(tables, **OPTIONS[kind])
    reference = Reference(kind, its_tables)
    before = [table.detach().clone() for table in tables]
    found = torch.autograd.grad(fast(*batch(0)).square().sum(), tables)
    expected = torch.autograd.grad(exact(*batch(0)).square().sum(), its_tables)
    for one, other in zip(found, expected, strict=True):
        dense = one.to_dense() if one.is_sparse else one
        torch.testing.assert_close(dense.double(), other, rtol=1e-4, atol=1e-5)
    fast(*batch(0)).square().sum().backward(inputs=others)
    assert all(map(torch.equal, tables, before)) and all(table.grad is None for table in tables)
    for run, leaves in ((fast, tables), (exact, its_tables)):
        leaves[0].grad = torch.ones_like(leaves[0])
        run(*batch(1)).square().sum().backward()
    reference()
    assert tables[0].grad is None
    assert_close(model, exact)


def test_hooks_behind_tables_run_once_for_all_of_a_gradient():
    model, _ = models()
    fast, seen = fxopt.optimize(model, config=fxopt.Config(tune="off")), []
    optimizers.SGD(optimizers.split(model)[0], lr=0.5)
    model.shared.weight.register_post_accumulate_grad_hook(lambda table: seen.append(table.grad))
    (fast(*batch(0)).sum() + fast(*batch(1)).sum()).backward()
    assert seen == [None]  # the optimizer, which was there before, has taken it


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_seen_before_a_step():
    model = nn.ModuleList([nn.EmbeddingBag(R, D, mode="sum"), nn.EmbeddingBag(R, D, mode="sum")])
    fast = fxopt.optimize(Sums(model), config=fxopt.Config(tune="off"))
    optimizers.SGD(optimizers.split(model)[0], lr=0.5)
    before = [table.weight.detach().clone() for table in model]
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        fast(torch.tensor([[1, 2]])).backward(torch.full((1, 2 * D), torch.nan))
    assert all(torch.equal(table.weight, one) for table, one in zip(model, before, strict=True))


class Sums(nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.bags = bags

    def forward(self, ids):
        return torch.cat([bag(ids) for bag in self.bags], 1)
