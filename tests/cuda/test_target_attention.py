"""Target attention on CUDA: what is found, and on a GPU whether it gives eager's numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels.target_attention.cuda import Attention, encoder
from fxopt.rewrites import target_attention
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.kernels.test_target_attention import eager, inputs, plan_of


def din(q, k, first, second):
    return attended(torch.relu, q, k, first, second)


def attended(activation, q, k, first, second):
    """A position whose first channel is negative is padding."""
    x = q.unsqueeze(1).expand(-1, k.shape[1], -1)
    x = activation(F.linear(torch.cat([x, k, x - k, x * k], -1), first))
    scores = F.linear(x, second).squeeze(-1).masked_fill(k.select(2, 0) < 0, -1e9)
    return (scores.softmax(-1).unsqueeze(-1) * k).sum(1)


def shapes(D=16, T=20, H=36):
    return [(7, D), (7, T, D), (H, 4 * D), (1, H)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_becomes_one_call(dtype):
    module = graph_of(din, shapes(), dtype)
    (found,) = rewritten(module, target_attention.REWRITE)
    assert len(found.changes) == 1 and not found.rolled_back
    assert "fxopt.target_attention" in names_of(module) and "aten.linear" not in names_of(module)
    (call,) = (node for node in module.graph.nodes if "bound" in node.meta)
    assert isinstance(call.meta["bound"], Attention)


@pytest.mark.parametrize("relu", [torch.relu, partial(torch.clamp, min=0)])
def test_a_relu_stays_in_registers(relu, monkeypatch):
    """Any other activation goes through shared memory, step by step."""
    module, found = graph_of(lambda *tensors: attended(relu, *tensors), shapes()), []
    rewritten(module, target_attention.REWRITE)
    (plan,) = (node.meta["bound"]._plan for node in module.graph.nodes if "bound" in node.meta)
    activation_of = encoder._Encoder._activation
    monkeypatch.setattr(encoder._Encoder, "_activation", lambda *args: found.append(activation_of(*args)) or found[-1])
    q, k, first, second = map(torch.randn, shapes())
    assert encoder.encode(([q], [k], [k[..., 0] < 0], [first, second]), plan)
    assert found == [encoder._RELU, encoder._NONE]


@pytest.mark.parametrize("sizes", [{"H": 129}, {"D": 130}, {"T": 1025}])
def test_what_the_kernel_does_not_hold_stays(sizes):
    module = graph_of(din, shapes(**sizes))
    (found,) = rewritten(module, target_attention.REWRITE)
    assert not found.changes and any("expected at most" in miss.reason for miss in found.misses)


def test_gradients_stay():
    assert not rewritten(graph_of(din, shapes()), target_attention.REWRITE, inference=False)[0].changes


def test_without_the_kernel_pytorch_serves():
    q, k, mask, params = inputs(3, 5, 4)
    plan = plan_of(4).words()
    torch.testing.assert_close(Attention(plan)([q], [k], [mask], params, plan), eager(q, k, mask, params))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(256, 100, 64), (3, 1, 1), (0, 5, 8), (2, 1024, 128)])
def test_on_a_gpu(dtype, sizes):
    q, k, mask, params = inputs(*sizes, dtype)
    exact = eager(q.double(), k.double(), mask, [x.double() for x in params])
    plan = plan_of(sizes[2]).words()
    on_gpu = [q.cuda()], [k.cuda()], [mask.cuda()], [x.cuda() for x in params]
    with torch.no_grad():
        found = Attention(plan)(*on_gpu, plan)
    rtol = max(1e-4, torch.finfo(dtype).eps)
    atol = 1e-4 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(found.cpu().double(), exact, rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.timed
def test_a_model_gives_eagers_numbers():
    class Din(nn.Module):
        def forward(self, *tensors):
            return din(*tensors)

    given = tuple(torch.randn(*shape, device="cuda") for shape in shapes())
    with torch.no_grad():
        optimized = fxopt.optimize(Din(), given)
        torch.testing.assert_close(optimized(*given), din(*given), rtol=1e-3, atol=1e-4)
