"""Branches beside each other on a GPU: replays give what calls give, whoever captures."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fxopt
from fxopt.kernels import side_stream
from fxopt.normalize import remove_dead_code
from fxopt.patterns.branches import SIDE
from fxopt.rewrites import branches
from fxopt.rewrites.framework.direct import direct
from fxopt.runtime import dispatcher_of
from tests.cuda.on_a_gpu import graph_of, rewritten
from tests.cuda.programs import Program, two_towers

pytestmark = pytest.mark.gpu


def lowered(function, shapes):
    module = graph_of(function, shapes)
    remove_dead_code(module)
    (findings,) = rewritten(module, branches.REWRITE)
    direct(module, inference=True)
    return module, len(findings.changes)


def captured(function, *inputs, **how):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, **how):
        result = function(*inputs)
    return graph, result


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("size", [4, 300, 2000])
def test_random_programs_replayed(size):
    applied = 0
    for seed in range(200, 200 + (60 if size < 2000 else 20)):
        program = Program(seed, size)
        inputs = [torch.randn(size, size, device="cuda") / size**0.5 for _ in range(4)]
        module, changes = lowered(program, [(size, size)] * 4)
        applied += changes
        graph, results = captured(module, *inputs)
        for _ in range(3):
            for each in inputs:
                each.copy_(torch.randn(size, size, device="cuda") / size**0.5)
            for _ in range(3):
                graph.replay()
            for result, expected in zip(results, program(*inputs), strict=True):
                close(result, expected)
    assert applied > 10


@torch.no_grad()
def test_captures_in_threads_take_streams_of_their_own():
    size, found = 300, {}
    module, _ = lowered(two_towers, [(size, size)] * 4)
    everything = [[torch.randn(size, size, device="cuda") / size**0.5 for _ in range(4)] for _ in range(4)]
    together = threading.Barrier(4)

    def serve(k):
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):
            module(*everything[k])
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            together.wait()
            graph.capture_begin(capture_error_mode="thread_local")
            together.wait()
            result = module(*everything[k])
            together.wait()
            graph.capture_end()
            for _ in range(20):
                graph.replay()
            torch.cuda.current_stream().synchronize()
        found[k] = graph, result

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, range(4)))
    for k in range(4):
        close(found[k][1], two_towers(*everything[k]))
    assert len(set(side_stream._SIDES.values())) >= 4


@torch.no_grad()
@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_capture_goes_on_after_an_error(broken):
    def sized(x, a, b, c):
        return torch.tanh(torch.relu(x @ a)) + torch.sigmoid(torch.sin(x @ b)) @ c

    module, changes = lowered(sized, [(8, 8)] * 4)
    assert changes
    inputs = [torch.randn(8, 8, device="cuda") for _ in range(4)]
    wrong = list(inputs)
    wrong[broken] = torch.randn(9, 9, device="cuda")

    def recovering(*inputs):
        with pytest.raises(RuntimeError):
            module(*wrong)
        return module(*inputs)

    current = torch.cuda.current_stream()
    graph, result = captured(recovering, *inputs)
    assert torch.cuda.current_stream() == current
    inputs[0].normal_()
    graph.replay()
    close(result, sized(*inputs))


class DeepAndCross(nn.Module):
    """Embeddings, a cross network and a factorization machine beside a deep tower (DCN and DeepFM in one)."""

    def __init__(self, fields: int = 26, dim: int = 16, crosses: int = 3, width: int = 400) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, dim) for _ in range(fields))
        n = fields * dim
        self.crosses = nn.ModuleList(nn.Linear(n, n) for _ in range(crosses))
        self.deep = nn.Sequential(nn.Linear(n, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.last = nn.Linear(n + width, 1)

    def forward(self, ids):
        rows = torch.stack([table(ids[:, t]) for t, table in enumerate(self.tables)], 1)
        x0 = x = rows.flatten(1)
        for cross in self.crosses:
            x = x0 * cross(x) + x
        machine = 0.5 * (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.last(torch.cat([x, self.deep(x0)], 1)) + 0.01 * machine)


@torch.no_grad()
def test_a_model_by_its_own_graphs_and_by_a_users():
    model = DeepAndCross().cuda()
    ids = torch.randint(0, 1000, (256, 26), device="cuda")
    optimized = fxopt.optimize(model, (ids,), fxopt.Config(cuda_graphs=True, tune="full"))
    (entry,) = dispatcher_of(optimized).entries
    (ran,) = [each for each in entry.findings.passes if each.name == "branches"]
    assert not ran.rolled_back
    if ran.changes:
        assert any(SIDE in node.meta for node in entry.executable.graph.graph.nodes)
    for batch in (256, 256, 250, 1, 1, 256):
        ids = torch.randint(0, 1000, (batch, 26), device="cuda")
        torch.testing.assert_close(optimized(ids), model(ids), rtol=1e-3, atol=1e-3)
    model.crosses[0].weight.mul_(0.5)
    torch.testing.assert_close(optimized(ids), model(ids), rtol=1e-3, atol=1e-3)
    graph, result = captured(optimized, ids)
    ids.copy_(torch.randint(0, 1000, ids.shape))
    model.deep[0].weight.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(result, model(ids), rtol=1e-3, atol=1e-3)
