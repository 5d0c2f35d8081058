"""fxopt.optimize on a GPU, end to end."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxopt
from bench.models import E, ManyColumns, make_inputs
from fxopt.kernels.columns.errors import BadId, check, clamped
from fxopt.runtime import dispatcher_of
from tests.cuda.compare import Two

pytestmark = pytest.mark.gpu


def to_gpu(x):
    return torch.utils._pytree.tree_map(lambda t: t.cuda(), x)


@pytest.fixture(scope="module")
def models():
    model = ManyColumns(E.scaled(60)).cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(model, to_gpu(make_inputs(model.mix, 32)))
    return model, optimized


def operators(optimized) -> tuple[int, int]:
    (entry,) = dispatcher_of(optimized).entries
    return entry.findings.operators_before, entry.findings.operators_after


@pytest.mark.parametrize("batch", [32, 1, 7, 300])
def test_equals_eager(models, batch):
    model, optimized = models
    inputs = to_gpu(make_inputs(model.mix, batch))
    with torch.no_grad():
        torch.testing.assert_close(optimized(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.register_buffer("edges", torch.arange(63) / 8)

    def forward(self, *floats):
        divisors = (0.3, 1e39, 16777217, 7.0, -1.1)
        ids = [torch.bucketize(x / c, self.edges) for x, c in zip(floats, divisors, strict=True)]
        return torch.cat([self.table(i) for i in ids], 1)


def test_a_division_is_the_product_with_a_reciprocal_rounded_once():
    model = Shares().cuda()
    floats = [torch.randint(0, 64, (4096,), device="cuda") / 8 * c for c in (0.3, 1, 16777216.0, 7.0, -1.1)]
    with torch.no_grad():
        assert torch.equal(fxopt.optimize(model)(*floats), model(*floats))


def test_a_leaf_of_offsets_leaves_the_device_alive():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 8, mode="sum")

        def forward(self, ids, offsets):
            return self.bag(ids.to(torch.int16), offsets) * 2  # torch's fake operator takes no int16

    model, ids = Bags().cuda(), torch.randint(0, 20, (10,), device="cuda")
    offsets = torch.tensor([0, 3, 5], device="cuda")
    with torch.no_grad():
        fast = fxopt.optimize(model, (ids, offsets))
        torch.testing.assert_close(fast(ids, offsets), model(ids, offsets))


def test_columns_became_one_operator(models):
    before, after = operators(models[1])
    assert before > 100 and after < 30


def test_graph_replay_sees_new_weights_and_inputs(models):
    model, optimized = models
    inputs = to_gpu(make_inputs(model.mix, 32))
    with torch.no_grad():
        optimized(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = optimized(*inputs)
        model.columns.floats[0].table.weight.add_(1)
        inputs[1][0].copy_(torch.rand(32))
        graph.replay()
        torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=1e-5)


def test_training_step_equals_eager():
    model = ManyColumns(E.scaled(30)).cuda()
    other = copy.deepcopy(model)
    inputs = to_gpu(make_inputs(model.mix, 16))
    optimized = fxopt.optimize(other, inputs)
    for m in (model, optimized):
        m(*inputs).square().sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_captured_backward_replays():
    model = ManyColumns(E.scaled(30)).cuda()
    inputs, other = (to_gpu(make_inputs(model.mix, 16, seed=seed)) for seed in range(2))
    optimized, side = fxopt.optimize(copy.deepcopy(model), inputs), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(2):
            optimized(*inputs).square().sum().backward()
    torch.cuda.synchronize()
    optimized.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimized(*inputs).square().sum().backward()
    inputs[1][0].copy_(other[1][0])
    for _ in range(3):
        torch.randint(1 << 40, (1000,)).pin_memory()  # must not take the memory that the graph reads
        graph.replay()
    model(*inputs).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), optimized.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_bad_id_is_named():
    ids = torch.randint(0, 10, (50, 2), device="cuda")
    model = Two().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (ids,))
        ids[17, 1] = 20
        optimized(ids)
        with pytest.raises(BadId, match=r"\(b\): id 20 at row 17 is outside table 'b.weight' with 20 rows"):
            check()
        ids[17, 1] = 19
        assert torch.equal(optimized(ids), model(ids))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_model_clamps_and_the_next_one_raises(cuda_graphs):
    ids, model = torch.randint(0, 10, (50, 2), device="cuda"), Two().cuda()
    with torch.no_grad():
        clamping = fxopt.optimize(model, (ids,), fxopt.Config(bad_ids="clamp", cuda_graphs=cuda_graphs))
        raising = fxopt.optimize(model, (ids,), fxopt.Config(cuda_graphs=cuda_graphs))
        with torch.inference_mode():  # what was captured there serves outside too
            for _ in range(3):
                clamping(ids), raising(ids)
        bad = ids.clone()
        bad[17, 1], bad[49, 0] = 20, -5  # the last row, which a graph repeats up to 64
        before = clamped()
        found = clamping(bad)
        assert clamped() - before == 2
        for _ in range(3):  # as it is, captured, replayed
            clamping(bad[9:])
        assert clamped() - before == 2 + 3 * 2
        bad[17, 1], bad[49, 0] = 19, 0
        assert torch.equal(found, model(bad))
        bad[17, 1] = 20
        raising(bad)
        with pytest.raises(BadId, match="id 20 at row 17"):
            check()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(10, 8), nn.Linear(8, 1)

    def forward(self, ids):
        return self.top(self.table(ids))


def test_a_single_lookup_does_not_assert_on_the_device():
    ids, model = torch.randint(0, 10, (50,), device="cuda"), Plain().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (ids,))
        bad = ids.clone()
        bad[17] = 10
        optimized(bad)
        with pytest.raises(BadId, match=r"id 10 at row 17 is outside table 'table.weight' with 10 rows"):
            check()
        torch.testing.assert_close(optimized(ids), model(ids))
