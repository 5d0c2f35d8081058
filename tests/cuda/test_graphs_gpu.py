"""Config(cuda_graphs=True): what a replay must see, and what it must not change."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fxopt
from bench.models import E, ManyColumns, make_inputs
from fxopt.kernels.columns.errors import BadId, check
from fxopt.runtime import dispatcher_of
from tests.cuda.compare import Two
from tests.keyed_bags import KeyedBags, keyed_inputs

pytestmark = pytest.mark.gpu


def to_gpu(x):
    return torch.utils._pytree.tree_map(lambda t: t.cuda(), x)


def of_batch(model, batch, seed=0):
    return to_gpu(make_inputs(model.mix, batch, seed=seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def replays(optimized):
    (entry,) = dispatcher_of(optimized).entries
    return entry.executable.run


@pytest.fixture
def pair():
    model = ManyColumns(E.scaled(60)).cuda()
    with torch.no_grad():
        yield model, fxopt.optimize(model, of_batch(model, 32), fxopt.Config(cuda_graphs=True))


def test_every_batch_of_a_bucket_by_one_graph(pair):
    model, optimized = pair
    for seed, batch in enumerate((32, 30, 29, 25, 32, 31)):
        inputs = of_batch(model, batch, seed)
        close(optimized(*inputs), model(*inputs))
    assert "each bucket" in replays(optimized)._findings.graphs
    assert len(replays(optimized)._graphs) == 1
    for batch in (1, 1, 3, 3, 300, 300, 0):
        inputs = of_batch(model, batch)
        close(optimized(*inputs), model(*inputs))


def test_more_ids_than_before(pair):
    model, optimized = pair
    for seed in range(3):
        inputs = of_batch(model, 32, seed)
        inputs = (*inputs[:3], [(torch.cat([v] * (1 + 3 * seed)), o) for v, o in inputs[3]])
        close(optimized(*inputs), model(*inputs))
        close(optimized(*inputs), model(*inputs))


def test_results_are_the_callers_own(pair):
    model, optimized = pair
    first, second = (of_batch(model, 32, seed) for seed in range(2))
    results = [optimized(*x) for x in (first, first, first, second)]
    close(results[2], model(*first))
    close(results[3], model(*second))


def test_weights_may_change(pair):
    model, optimized = pair
    inputs = of_batch(model, 32)
    for _ in range(3):
        optimized(*inputs)
    model.columns.floats[0].table.weight.add_(1)  # in place
    close(optimized(*inputs), model(*inputs))
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})
    close(optimized(*inputs), model(*inputs))
    model.columns.floats[1].table.weight.data = torch.randn_like(model.columns.floats[1].table.weight)  # moved
    close(optimized(*inputs), model(*inputs))
    model.top[0].weight = nn.Parameter(torch.randn_like(model.top[0].weight) / 30)
    close(optimized(*inputs), model(*inputs))


def test_strided_inputs(pair):
    model, optimized = pair
    dense, floats, ids, bags = make_inputs(model.mix, 32, packed=True)
    inputs = to_gpu((dense.t().contiguous(), floats, ids, bags))
    inputs = (inputs[0].t(), inputs[1].unbind(1), inputs[2].unbind(1), inputs[3])
    inputs = (inputs[0], list(inputs[1]), list(inputs[2]), inputs[3])
    for _ in range(3):
        close(optimized(*inputs), model(*inputs))


def test_streams_and_threads(pair):
    model, optimized = pair
    calls = [of_batch(model, 32, seed) for seed in range(4)]
    expected = [model(*inputs) for inputs in calls]
    for _ in range(2):
        optimized(*calls[0])
    torch.cuda.synchronize()
    found: dict[int, list] = {}

    def serve(k):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found[k] = [optimized(*calls[k]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, range(4)))
    for k in range(4):
        for result in found[k]:
            close(result, expected[k])


def test_gradients_run_without_graphs(pair):
    model, optimized = pair
    inputs = of_batch(model, 8)
    with torch.enable_grad():
        optimized(*inputs).sum().backward()
    assert model.top[0].weight.grad is not None


def test_a_users_own_capture(pair):
    model, optimized = pair
    inputs = of_batch(model, 32)
    for _ in range(3):
        optimized(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = optimized(*inputs)
    inputs[1][0].copy_(torch.rand(32))
    graph.replay()
    close(out, model(*inputs))


def test_bad_ids_are_named_and_the_next_call_is_served():
    ids = torch.randint(0, 10, (50, 2), device="cuda")
    model = Two().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (ids,), fxopt.Config(cuda_graphs=True))
        for _ in range(3):
            assert torch.equal(optimized(ids), model(ids))
        bad = ids.clone()
        bad[17, 1] = 20
        named = r"\(b\): id 20 at row 17 is outside table 'b.weight' with 20 rows"
        optimized(bad)
        with pytest.raises(BadId, match=named):
            check()
        optimized(bad)
        torch.cuda.synchronize()
        with pytest.raises(BadId, match=named):
            optimized(ids)
        assert torch.equal(optimized(ids), model(ids)) and len(replays(optimized)._graphs) == 1


class FromHost(nn.Module):
    """Inputs come on the host, and go over one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(20))
        self.top = nn.Linear(160, 1)

    def forward(self, ids):
        device = self.top.weight.device
        return self.top(torch.cat([t(i.to(device)) for t, i in zip(self.tables, ids, strict=True)], 1))


def test_inputs_on_the_host():
    model = FromHost().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(
            model, ([torch.randint(0, 50, (24,)) for _ in range(20)],), fxopt.Config(cuda_graphs=True)
        )
        for batch in (24, 24, 23, 20, 24, 19, 24, 21):
            ids = [torch.randint(0, 50, (batch,)) for _ in range(20)]
            close(optimized(ids), model(ids))
        assert len(replays(optimized)._graphs) == 1


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, ids):
        rows = self.table(ids % 10)
        return rows - rows.mean(0)


def test_rows_that_depend_on_others_are_not_padded():
    model = Mixing().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (torch.arange(30, device="cuda"),), fxopt.Config(cuda_graphs=True))
        for batch in (30, 29, 30, 29, 30, 29):
            ids = torch.randint(0, 10, (batch,), device="cuda")
            close(optimized(ids), model(ids))
        assert "set of sizes" in replays(optimized)._findings.graphs and len(replays(optimized)._graphs) == 2


class Weighted(nn.Module):
    """Keeps its attention weights for whoever asks later, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, ids):
        rows = self.table(ids)
        self.weights, self.asked = self.score(rows).softmax(1), ids
        return (self.weights * rows).sum(1)


def test_ids_by_lengths_of_several_features():
    """One graph for any number of ids, and wrong lengths are an error of the next call, as bad ids are."""
    model = KeyedBags().cuda().eval()
    with torch.no_grad():
        optimized = fxopt.optimize(model, to_gpu(keyed_inputs(32)), fxopt.Config(cuda_graphs=True))
        for most in (6, 6, 6, 5, 0, 6, 1):
            inputs = to_gpu(keyed_inputs(32, most=most))
            close(optimized(*inputs), model(*inputs))
        assert len(replays(optimized)._graphs) == 1
        assert "whatever the number of ids" in replays(optimized)._findings.graphs
        for _ in range(2):
            inputs = to_gpu(keyed_inputs(32, most=30))
            close(optimized(*inputs), model(*inputs))
        for batch in (7, 7, 7, 1, 1, 0):
            inputs = to_gpu(keyed_inputs(batch))
            close(optimized(*inputs), model(*inputs))
        dense, ids, lengths = to_gpu(keyed_inputs(32))
        assert optimized(dense, ids[:-1], lengths).shape == (32, 1)
        with pytest.raises(RuntimeError, match=f"lengths of {len(ids)} ids in all, found {len(ids) - 1}"):
            check()
        close(optimized(dense, ids, lengths), model(dense, ids, lengths))


def test_attributes_are_stored_behind_replays():
    model = Weighted().cuda()
    with torch.no_grad():
        optimized = fxopt.optimize(
            model, (torch.randint(0, 50, (30, 7), device="cuda"),), fxopt.Config(cuda_graphs=True)
        )
        kept = []
        for _ in range(4):
            ids = torch.randint(0, 50, (30, 7), device="cuda")
            expected, weights = model(ids), model.weights
            close(optimized(ids), expected)
            close(model.weights, weights)
            assert model.asked is ids
            kept.append((model.weights, weights))
        assert len(replays(optimized)._graphs) == 1
        for mine, eager in kept:
            close(mine, eager)


RESULTS = {
    "rows": lambda y, x: y,
    "a gate": lambda y, x: torch.sigmoid(y),
    "turned": lambda y, x: (y * 2).t(),
    "one number many times": lambda y, x: (y * 3)[:, :1].expand(-1, 5),
    "a column": lambda y, x: (y + 1)[:, 0],
    "halves": lambda y, x: (y * 2).half(),
    "single bytes": lambda y, x: (y > 0).to(torch.uint8)[:, :3].contiguous(),
    "ids": lambda y, x: y.argmax(1),
    "of all rows": lambda y, x: y.sum(),
    "three rows each": lambda y, x: y.repeat(3, 1),
    "nothing": lambda y, x: y[:, :0].clone(),
    "at an odd address": lambda y, x: torch.cat([y.reshape(-1)[:3], y.reshape(-1)])[3:],
    "the input": lambda y, x: x,
    "conjugates": lambda y, x: torch.complex(y, -y).conj(),
}


class Results(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.layer, self.names = nn.Linear(6, 8), names

    def forward(self, x):
        y = self.layer(x).relu()
        return [RESULTS[name](y, x) for name in self.names]


@pytest.mark.parametrize("seed", range(12))
def test_results_of_every_kind(seed):
    rng = random.Random(seed)
    model = Results(rng.choices(list(RESULTS), k=rng.choice((1, 3, 8, 70)))).cuda()
    optimized = fxopt.optimize(model, config=fxopt.Config(tune="off", cuda_graphs=True))
    before: list = []
    with rng.choice((torch.no_grad, torch.inference_mode))():
        for batch in (8, 8, 8, 5, 1, 1, 1, 0, 300, 257, 300, 300, 8):
            x = torch.randn(batch, 6, device="cuda")
            found, expected = optimized(x), model(x)
            for result, one, kept in before:
                assert torch.equal(result, kept), f"a later call changed {one}"
            before = [(result, name, result.clone()) for result, name in zip(found, model.names, strict=True)]
            for mine, eager in zip(found, expected, strict=True):
                assert mine.shape == eager.shape and mine.dtype == eager.dtype
                close(mine, eager)
