"""Whoever traces or transforms an optimized model sees the original forward, and gets the original's answer."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.models import Tower, assert_same, optimize, tower_inputs


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Tower().eval()
    fast, recorder = optimize(model)
    return model, fast, recorder


@pytest.mark.parametrize("warm", [False, True])
def test_compile_export_and_trace(pair, warm):
    model, fast, recorder = pair
    inputs = tower_inputs()
    expected = model(*inputs)
    if warm:
        fast(*inputs)
    runs = recorder.runs
    torch._dynamo.reset()
    assert_same(torch.compile(fast, backend="eager", fullgraph=True)(*inputs), expected)
    assert_same(torch.export.export(fast, inputs).module()(*inputs), expected)
    assert_same(torch.export.export(fast, inputs, strict=True).module()(*inputs), expected)
    assert_same(torch.jit.trace(fast, inputs, check_trace=False)(*inputs), expected)
    graph = make_fx(lambda *args: fast(*args))(*inputs)
    assert any(node.target is torch.ops.aten.embedding.default for node in graph.graph.nodes)
    assert_same(graph(*inputs), expected)
    assert recorder.runs == runs
    assert_same(fast(*inputs), expected)
    assert recorder.runs == runs + 1


def test_functorch(pair):
    model, fast, recorder = pair
    dense, ids = tower_inputs()
    fast(dense, ids)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(module, params, dense):
        return torch.func.functional_call(module, params, (dense, ids)).square().sum()

    ours, eager = (torch.func.grad(loss, argnums=1)(m, params, dense) for m in (fast, model))
    assert ours and ours.keys() == eager.keys()
    for name in ours:
        assert_same(ours[name], eager[name])
    batch = torch.stack([dense, dense * 2])
    assert_same(*(torch.vmap(lambda d, m=m: m(d, ids))(batch) for m in (fast, model)))
    tangents = [torch.func.jvp(lambda d, m=m: m(d, ids), (dense,), (dense,)) for m in (fast, model)]
    assert_same(*tangents)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(dense, torch.ones_like(dense))
        outs = [torch.autograd.forward_ad.unpack_dual(m(dual, ids)).tangent for m in (fast, model)]
        assert_same(*outs)
    assert recorder.runs == 1


def test_modes_see_the_original_operators(pair):
    _, fast, recorder = pair
    inputs = tower_inputs()
    fast(*inputs)
    with FlopCounterMode(display=False) as counter:
        fast(*inputs)
    assert counter.get_total_flops() == 2 * 6 * 11
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = fast(*(mode.from_tensor(t) for t in inputs))
        assert out.shape == (6, 1)
    fakes = [mode.from_tensor(t) for t in inputs]
    assert type(fakes[0]) is not torch.Tensor
    assert recorder.runs == 1


def test_nested_optimized_models():
    inner, inner_recorder = optimize(Tower().eval())

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, dense, ids):
            return self.inner(dense, ids) * 2

    model = Outer().eval()
    inputs = tower_inputs()
    expected = model(*inputs)
    fast, recorder = optimize(model)
    runs = inner_recorder.runs
    assert_same(fast(*inputs), expected)
    assert recorder.runs == 1 and inner_recorder.runs == runs


def test_data_parallel_replica_runs_eagerly(pair):
    model, fast, recorder = pair
    replica = fast._replicate_for_data_parallel()
    inputs = tower_inputs()
    replica._parameters, replica._buffers, replica._modules = model._parameters, model._buffers, model._modules
    assert_same(replica(*inputs), model(*inputs))
    assert recorder.runs == 0
