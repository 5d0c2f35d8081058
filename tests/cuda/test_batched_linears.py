"""Linear layers of the same sizes on CUDA as one batched product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.rewrites import batched_linears, linear_layers
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten

PASSES = (linear_layers.REWRITE, batched_linears.REWRITE)


def experts(x, bias, *weights):
    """Two layers each, ReLU behind the first."""
    half = len(weights) // 2
    hidden = [torch.relu(F.linear(x, weight, bias)) for weight in weights[:half]]
    return torch.stack([F.linear(h, weight) for h, weight in zip(hidden, weights[half:], strict=True)], 1)


def test_layers_of_one_input_and_of_several():
    module = graph_of(experts, [(7, 20), (30,), *[(30, 20)] * 4, *[(5, 30)] * 4])
    cpu = [torch.randn(*shape) for shape in ((7, 20), (30,), *[(30, 20)] * 4, *[(5, 30)] * 4)]
    *_, groups = rewritten(module, *PASSES)
    names = names_of(module)
    assert len(groups.changes) == 2 and not groups.rolled_back
    assert names.count("aten.bmm") == 2 and "fxopt.gpu_linear" not in names
    torch.testing.assert_close(module(*cpu), experts(*cpu))


@pytest.mark.parametrize("middle", [(5,), (2, 3)])
def test_layers_of_more_dims(middle):
    shapes = ((7, *middle, 20), (30,), *[(30, 20)] * 4, *[(5, 30)] * 4)
    module = graph_of(experts, shapes)
    given = [torch.randn(*shape) for shape in shapes]
    *_, groups = rewritten(module, *PASSES)
    assert len(groups.changes) == 2 and not groups.rolled_back
    assert names_of(module).count("aten.bmm") == 2
    result = module(*given)
    torch.testing.assert_close(result, experts(*given))
    assert result.stride() == experts(*given).stride()


def gated(x, *weights):
    """Experts and gates of several widths, which read one input."""
    biases, weights = weights[:4], weights[4:]
    layers = [torch.relu(F.linear(x, *layer)) for layer in zip(weights, biases, strict=True)]
    return torch.cat([layer.mean(1, keepdim=True) for layer in layers], 1)


def test_layers_of_one_input_and_several_widths():
    shapes = [(7, 20), *[(width,) for width in (30, 8, 30, 3)], *[(width, 20) for width in (30, 8, 30, 3)]]
    module, given = graph_of(gated, shapes), [torch.randn(*shape) for shape in shapes]
    *_, wide = rewritten(module, linear_layers.REWRITE, batched_linears.WIDE)
    assert len(wide.changes) == 1 and not wide.rolled_back
    assert names_of(module).count("fxopt.gpu_linear") == 1
    torch.testing.assert_close(module(*given), gated(*given))


def test_layers_whose_strides_are_seen_stay():
    def viewed(x, *weights):
        return [F.linear(x, weight).view(-1, 2).sum(1) for weight in weights]

    for function, others in ((viewed, 0), (experts, 1)):
        shapes = [(7, 20), *[(30,)] * others, *[(30, 20)] * 4, *[(5, 30)] * 4 * others]
        (ran,) = rewritten(graph_of(function, shapes), batched_linears.WIDE, inference=function is viewed)
        assert not ran.changes and not ran.rolled_back


@pytest.mark.parametrize("shape", [(1, 1), (), (1,), (1, 4), (3, 4)])
@pytest.mark.parametrize("outputs", [1, 4])
def test_biases_that_are_no_vectors_of_the_outputs_stay(shape, outputs):
    """torch broadcasts them; joined, they would be those of other rows."""
    if shape and shape[-1] > 1 and shape[-1] != outputs:
        return

    def layers(x, *tensors):
        return sum(F.linear(x, *pair).relu() for pair in zip(tensors[:3], tensors[3:], strict=True))

    shapes = [(3, 20), *[(outputs, 20)] * 3, *[shape] * 3]
    module, given = graph_of(layers, shapes), [torch.randn(shape) for shape in shapes]
    wide, groups = rewritten(module, batched_linears.WIDE, batched_linears.REWRITE)
    assert bool(wide.changes) == (shape == (outputs,)) and not (wide.rolled_back or groups.rolled_back)
    torch.testing.assert_close(module(*given), layers(*given))


def test_weights_that_are_vectors_stay():
    def vectors(x, *weights):
        return sum(F.linear(x, weight) for weight in weights)

    module = graph_of(vectors, [(7, 5, 20), *[(20,)] * 3])
    wide, groups = rewritten(module, batched_linears.WIDE, batched_linears.REWRITE)
    assert not (wide.changes or groups.changes or wide.rolled_back or groups.rolled_back)


def test_views_that_leave_keep_no_results_of_others_alive():
    def turned(x, *weights):
        return [F.linear(x, weight).t() for weight in weights]

    module = graph_of(turned, [(7, 20), *[(30, 20)] * 4])
    wide, groups = rewritten(module, batched_linears.WIDE, batched_linears.REWRITE)
    assert not (wide.changes or groups.changes)


def test_two_layers_other_sizes_and_outputs_stay():
    def outputs(x, *weights):
        return [F.linear(x, weight) for weight in weights]

    def sums(x, *weights):
        return sum(F.linear(x, weight).sum(1) for weight in weights)

    for function, shapes in (
        (outputs, [(30, 20)] * 4),
        (sums, [(30, 20)] * 2),
        (sums, [(30, 20), (31, 20), (32, 20), (33, 20)]),
    ):
        module = graph_of(function, [(7, 20), *shapes])
        assert not rewritten(module, batched_linears.REWRITE)[0].changes


def test_one_after_the_other_are_no_group():
    def chain(x, *weights):
        for weight in weights:
            x = F.linear(x, weight)
        return x * 2

    module = graph_of(chain, [(7, 20), *[(20, 20)] * 4])
    assert not rewritten(module, batched_linears.REWRITE)[0].changes


@pytest.mark.gpu
@pytest.mark.timed
def test_a_model_gives_eagers_numbers():
    class Experts(nn.Module):
        def forward(self, *tensors):
            return experts(*tensors)

    shapes = ((300, 200), (256,), *[(256, 200)] * 8, *[(140, 256)] * 8)
    given = tuple(torch.randn(*shape, device="cuda") for shape in shapes)
    with torch.no_grad():
        optimized = fxopt.optimize(Experts(), given)
        torch.testing.assert_close(optimized(*given), experts(*given), rtol=1e-3, atol=1e-2)
