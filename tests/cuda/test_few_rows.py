"""Linear layers in one launch for a few rows: which are found, and on a GPU whether they give eager's numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels.mlp.cuda.few_rows import OPERATORS, gpu_few_rows, reference
from fxopt.kernels.mlp.cuda.linear import CODES
from fxopt.rewrites import linear_chains, linear_layers
from fxopt.tune.tuner import Tuner, Verdict
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.programs import layers

PASSES = (linear_layers.REWRITE, linear_chains.FOR_FEW_ROWS)


def tower(x, *weights):
    for weight in weights:
        x = torch.relu(F.linear(x, weight))
    return x


def test_layers_become_one_call():
    module = graph_of(tower, [(7, 300), (500, 300), (200, 500), (1, 200)])
    _, found = rewritten(module, *PASSES)
    assert names_of(module) == ["fxopt.gpu_few_rows"] and len(found.changes) == 1 and not found.rolled_back


def test_plain_linears_are_layers_too():
    def plain(x, a, b):
        return F.linear(F.linear(x, a), b)

    module = graph_of(plain, [(7, 300), (500, 300), (200, 500)])
    rewritten(module, linear_chains.FOR_FEW_ROWS)
    assert names_of(module) == ["fxopt.gpu_few_rows"]


def test_chains_of_narrow_layers_are_taken_along():
    def narrow(x, a, b, c, d):
        return torch.sigmoid(F.linear(torch.relu(F.linear(F.linear(torch.relu(F.linear(x, a)), b), c)), d))

    shapes = [(7, 300), (500, 300), (100, 500), (20, 100), (1, 20)]
    module = graph_of(narrow, shapes)
    rewritten(module, *PASSES[:1], linear_chains.OF_NARROW_LAYERS)
    assert "fxopt.mlp_chains" in names_of(module)
    rewritten(module, linear_chains.FOR_FEW_ROWS)
    assert names_of(module) == ["fxopt.gpu_few_rows"]
    tensors = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(module(*tensors), narrow(*tensors))


def test_chains_that_do_more_stay():
    def silu(x, a, b, c):
        return F.linear(F.silu(F.linear(torch.relu(F.linear(x, a)), b)), c)

    def beside(x, a, b, c):
        y = torch.relu(F.linear(x, a))
        return F.linear(F.linear(y, b), c), F.linear(y, b)

    for function in (silu, beside):
        module = graph_of(function, [(7, 300), (500, 300), (100, 500), (20, 100)])
        rewritten(module, *PASSES[:1], linear_chains.OF_NARROW_LAYERS, linear_chains.FOR_FEW_ROWS)
        assert "fxopt.gpu_few_rows" not in names_of(module)


def test_what_cannot_be_one_call_stays():
    def twice(x, a, b):
        y = torch.relu(F.linear(x, a))
        return y, F.linear(y, b)

    def edited(x, a, b):
        y = F.linear(x, a)
        b.mul_(2)
        return F.linear(y, b)

    shapes = [(7, 300), (500, 300), (200, 500)]
    for function, sizes, dtype, inference in (
        (twice, shapes, torch.float32, True),
        (edited, shapes, torch.float32, True),
        (tower, [(7, 30), (50, 30), (20, 50)], torch.float32, True),  # not by fours
        (tower, shapes, torch.bfloat16, True),
        (tower, shapes, torch.float32, False),
    ):
        module = graph_of(function, sizes, dtype)
        rewritten(module, linear_chains.FOR_FEW_ROWS, inference=inference)
        assert "fxopt.gpu_few_rows" not in names_of(module)


def test_the_operator_gives_eagers_numbers_everywhere():
    OPERATORS.load()
    x, weights, biases = torch.randn(3, 5), [torch.randn(4, 5), torch.randn(2, 4)], [torch.randn(4), None]
    found = torch.ops.fxopt.gpu_few_rows(x, weights, biases, [CODES["relu"], CODES["sigmoid"]])
    expected = torch.sigmoid(F.linear(torch.relu(F.linear(x, weights[0], biases[0])), weights[1]))
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(8152, 1024, 1024, 128, 1), (4, 4), (1028, 3000, 8, 700), (64,) * 17])
def test_equals_fp64(sizes, bias):
    weights, biases, codes = layers(sizes, bias, "cuda")
    for rows in (0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 300):
        x = torch.randn(rows, sizes[0], device="cuda")
        with torch.no_grad():
            found = gpu_few_rows(x, weights, biases, codes)
        doubles = [b if b is None else b.double() for b in biases]
        exact = reference(x.double(), [w.double() for w in weights], doubles, codes)
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3 if rows > 16 else 1e-5)


@pytest.mark.gpu
def test_what_the_kernel_does_not_know_goes_layer_by_layer():
    weights, biases, codes = layers((64, 32, 16), device="cuda")
    for x in (torch.randn(64, 3, device="cuda").t(), torch.randn(3, 65, device="cuda")[:, 1:]):
        with torch.no_grad():
            found = gpu_few_rows(x, weights, biases, codes)
            torch.testing.assert_close(found, reference(x, weights, biases, codes), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_streams_and_replays_beside_each_other_give_the_same_bits():
    weights, biases, codes = layers((2048, 1024, 1024, 64, 1), device="cuda")
    x = torch.randn(5, 2048, device="cuda")
    with torch.no_grad():
        expected = gpu_few_rows(x, weights, biases, codes)
        torch.cuda.synchronize()
        streams, graphs, results = [torch.cuda.Stream() for _ in range(4)], [], []
        for stream in streams:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results.append(gpu_few_rows(x, weights, biases, codes))
            graphs.append(graph)
        for _ in range(50):
            for stream, graph in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    results.append(gpu_few_rows(x, weights, biases, codes))
            results = results[:4] + results[-4:]
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
def test_a_replay_sees_an_update_and_nan_passes():
    weights, biases, codes = layers((2048, 512, 4), device="cuda")
    x = torch.randn(2, 2048, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        gpu_few_rows(x, weights, biases, codes)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = gpu_few_rows(x, weights, biases, codes)
        weights[0].mul_(-1)
        x[1, 7] = float("nan")
        graph.replay()
        torch.testing.assert_close(found[:1], reference(x, weights, biases, codes)[:1], rtol=2e-3, atol=2e-3)
    assert found[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.timed
def test_a_model_gives_eagers_numbers(monkeypatch):
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: Verdict({16: 2.0}))  # whatever else the GPU is busy with
    sizes = (2048, 1024, 1024, 512, 128, 4)
    parts = [part for K, N in itertools.pairwise(sizes) for part in (nn.Linear(K, N), nn.ReLU())]
    model = nn.Sequential(*parts).cuda().eval()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (torch.randn(4, 2048, device="cuda"),))
        for rows in (1, 4, 16, 17, 300):
            x = torch.randn(rows, 2048, device="cuda")
            torch.testing.assert_close(optimized(x), model(x), rtol=2e-3, atol=2e-3)
    (found,) = optimized._fxopt.findings
    (ran,) = (ran for ran in found.passes if ran.name == "gpu_few_rows")
    assert ran.changes and not ran.rolled_back
