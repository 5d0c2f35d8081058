"""Chains of narrow layers on CUDA: which are found, and on a GPU whether they give eager's numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels.mlp.cuda.chains import OPERATORS, Chains
from fxopt.kernels.mlp.plan import Op, encode, joined
from fxopt.rewrites import linear_chains, linear_layers
from fxopt.rewrites.framework.direct import direct
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.test_linear_chains_shim import exact, example

GETITEM = "<built-in function getitem>"
PASSES = (linear_layers.REWRITE, linear_chains.OF_NARROW_LAYERS)


def tower(x, *weights):
    for weight in weights:
        x = torch.relu(F.linear(x, weight))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_activations_become_one_call(dtype):
    module = graph_of(tower, [(7, 200), (128, 200), (32, 128), (1, 32)], dtype)
    _, chains = rewritten(module, *PASSES)
    assert names_of(module) == ["fxopt.mlp_chains", GETITEM] and len(chains.changes) == 1 and not chains.rolled_back


def test_generated_code_calls_what_is_put_in_place():
    module = graph_of(tower, [(7, 20), (12, 20), (5, 12)])
    rewritten(module, *PASSES)
    x, *weights = (torch.randn(7, 20), torch.randn(12, 20), torch.randn(5, 12))
    direct(module)
    torch.testing.assert_close(module(x, *weights), tower(x, *weights))


def test_wide_layers_stay():
    module = graph_of(tower, [(7, 300), (129, 300), (64, 129), (64, 64)])
    rewritten(module, *PASSES)
    assert names_of(module) == ["fxopt.gpu_linear", "fxopt.mlp_chains", GETITEM]


def test_what_is_read_twice_stays_outside():
    def twice(x, a, b):
        y = torch.sigmoid(F.linear(x, a))
        return y, F.silu(F.linear(y, b))

    module = graph_of(twice, [(7, 20), (30, 20), (5, 30)])
    rewritten(module, *PASSES)
    assert names_of(module) == ["fxopt.gpu_linear", "fxopt.mlp_chains", GETITEM]


def test_gradients_layer_norms_and_single_layers_stay():
    def normed(x, a):
        return F.layer_norm(F.linear(x, a), (30,))

    for function, inference in ((normed, True), (tower, False)):
        module = graph_of(function, [(7, 20), (30, 20), *[(5, 30)] * (function is tower)])
        before = names_of(module)
        rewritten(module, linear_chains.OF_NARROW_LAYERS, inference=inference)
        assert names_of(module) == before


def test_without_the_kernel_layers_serve():
    state, steps = example(Op.SILU, (6, 5, 3))
    x, plan = torch.randn(4, 6), joined([(len(state), encode(1, steps))] * 2)
    OPERATORS.load()
    for operator in (Chains(plan), torch.ops.fxopt.mlp_chains):
        for y in operator([x, x], [*state, *state], plan):
            torch.testing.assert_close(y.double(), exact(x, state, steps))


def test_experts_and_gates_share_a_launch():
    def experts(x, a, b, c, gate, head):
        found = torch.stack([torch.relu(F.linear(x, w)) for w in (a, b, c)], 1)
        mixed = (F.linear(x, gate).softmax(-1).unsqueeze(-1) * found).sum(1)
        return F.linear(torch.relu(F.linear(mixed, head)), head)

    module = graph_of(experts, [(7, 20), *[(30, 20)] * 3, (3, 20), (30, 30)])
    _, chains = rewritten(module, *PASSES)
    names = names_of(module)
    assert names.count("fxopt.mlp_chains") == 2 and "aten.linear" not in names and not chains.rolled_back


def test_a_chain_behind_another_reads_what_replaced_it():
    def twice(x, a, b, c):
        y = torch.relu(F.linear(x, a))
        return F.silu(F.linear(y, b)) + F.silu(F.linear(y, c))

    module = graph_of(twice, [(7, 20), (30, 20), (5, 30), (5, 30)])
    rewritten(module, linear_chains.OF_NARROW_LAYERS)
    assert [name for name in names_of(module) if name != GETITEM] == ["fxopt.mlp_chains"] * 2 + ["aten.add.Tensor"]


def test_more_than_a_launch_holds_are_cut():
    def many(x, *weights):
        return [F.linear(x, weight) for weight in weights]

    module = graph_of(many, [(7, 20), *[(3, 20)] * 14])
    rewritten(module, *PASSES)
    assert [name for name in names_of(module) if name != GETITEM] == ["fxopt.mlp_chains"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(40, 128, 17, 1), (1, 65), (700, 3, 128, 128)])
def test_on_a_gpu(dtype, sizes):
    for op in (Op.RELU, Op.BATCH_NORM, Op.DICE):
        state, steps = (
            [t.cuda() for t in some] if k == 0 else some for k, some in enumerate(example(op, sizes, dtype))
        )
        plan = joined([(len(state), encode(1, steps))] * 3)
        for rows in (0, 1, 33, 5000):
            x = torch.randn(rows, sizes[0], device="cuda").to(dtype)
            with torch.no_grad():
                *_, found = Chains(plan)([x] * 3, state * 3, plan)
            rtol = max(2e-5, torch.finfo(dtype).eps)
            torch.testing.assert_close(found.double(), exact(x, state, steps), rtol=rtol, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.timed
def test_a_model_gives_eagers_numbers():
    layers = (nn.Linear(60, 128), nn.BatchNorm1d(128), nn.SiLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.Sequential(*layers).cuda().eval()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (torch.randn(64, 60, device="cuda"),))
        for rows in (1, 33, 3000):
            x = torch.randn(rows, 60, device="cuda")
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-3, atol=1e-4)
