"""Mixtures of experts on CUDA: the kernel through the shim and on a GPU. What is found: test_mixtures.py."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fxopt.kernels.mixtures.cuda.mixtures import KERNEL, OPERATORS, gpu_mixtures, parameters, reference
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run, written_alone

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no maximum": ("expf(x[k] - most)", "expf(x[k] - ({} ? 0 : most))"),
    "the first logit as the maximum": ("fmaxf(most, x[k])", "({} ? most : fmaxf(most, x[k]))"),
    "logits behind the last": ("x[k] = k < count ? expf", "x[k] = k < count || {} ? expf"),
    "not divided": ("x[k] / sum", "x[k] / ({} ? 1 : sum)"),
    "experts of the first mixture": ("p.numbers[mixture][k]", "p.numbers[{} ? 0 : mixture][k]"),
    "logits of the first mixture": ("p.logits[mixture];", "p.logits[{} ? 0 : mixture];"),
    "rows behind the last": ("row >= p.rows", "row >= p.rows + {}"),
    "the first row's logits": ("load<Float>(logits.data, row *", "load<Float>(logits.data, ({} ? 0 : row) *"),
    "logits side by side": ("k * logits.strides[1]", "k * ({} ? 1 : logits.strides[1])"),
    "experts without a pitch": ("row * expert.strides[0]", "row * ({} ? p.dim : expert.strides[0])"),
    "the first chunk alone": ("+ chunk * UNIT);", "+ ({} ? 0 : chunk) * UNIT);"),
    "more at once than is aligned": ("/ 4 | p.experts[k].strides[0];", "/ 4 | ({} ? 0 : p.experts[k].strides[0]);"),
    "many weights as few": ("p.weights[k] > kFew", "p.weights[k] > kFew && !{}"),
    "one mixture too few": ("unsigned(p.mixtures)", "unsigned(p.mixtures - {})"),
}  # fmt: skip
SIZES = [  # B, D, the experts of each mixture
    (33, 64, ([0, 1, 2], [2, 1, 0])),
    (256, 128, ([0, 1], [1, 2], [0, 1, 2])),
    (0, 8, ([0, 1],)),
    (1, 64, ([0, 1], [2, 3], [4, 4])),
    (7, 1, ([0, 1, 2], [3, 4, 5, 6])),
    (50, 3, ([0, 1, 2, 3, 4],)),
    (19, 130, (list(range(16)), [3])),
    (5, 12, (list(range(9)), [1, 1, 1])),
    (3, 20, tuple([k, 31 - k] for k in range(16))),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("mixtures"), MUTATIONS, "mixtures/cuda/mixtures.cu")


def example(B, D, mixtures, device="cpu", wide=False):
    """Where it is wide, experts are slices of one result whose rows lie apart, and logits are columns of it."""
    n = 1 + max(map(max, mixtures))
    if wide:
        pitch = n * D + D % 2
        experts = [torch.randn(B, pitch, device=device)[:, k * D : k * D + D] for k in range(n)]
        logits = [torch.randn(B, 2 * len(own) + 1, device=device)[:, 1::2] for own in mixtures]
    else:
        experts = [torch.randn(B, D, device=device) for _ in range(n)]
        logits = [5 * torch.randn(B, len(own), device=device) for own in mixtures]
    return logits, experts, [number for own in mixtures for number in own]


def exact(logits, experts, numbers):
    return reference([each.double() for each in logits], [each.double() for each in experts], numbers)


def found(library, logits, experts, numbers, seed=0):
    with written_alone(*[experts[0].shape] * len(logits)) as outputs:
        if experts[0].numel():
            given = parameters(logits, experts, numbers, outputs)
            run(library, library.fxopt_mixtures, given, (*logits, *experts), torch.float32, seed)
    return [out.double() for out in outputs]


def check(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_fp64(shim, sizes, wide):
    arguments = example(*sizes, wide=wide)
    check(found(shim, *arguments, seed=wide), exact(*arguments))


@pytest.mark.parametrize("K", range(2, 17))
def test_any_number_of_experts(shim, K):
    arguments = example(6, 10, (list(range(K)), [0, K - 1]))
    check(found(shim, *arguments), exact(*arguments))


def test_any_alignment_and_strides(shim):
    for offset in range(4):
        memory = torch.randn(9 * 12 + 4)
        experts = [memory[offset:].as_strided((9, 8), (12, 1)), torch.randn(1, 8).expand(9, 8)]
        logits = [torch.randn(2, 9).t(), torch.randn(1, 2).expand(9, 2), torch.randn(9, 1).expand(9, 2)]
        arguments = logits, experts, [0, 1, 1, 0, 0, 0]
        check(found(shim, *arguments), exact(*arguments))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_numbers_that_are_not_finite_and_large_ones_as_in_torch(shim, value):
    logits, experts, numbers = example(5, 8, ([0, 1, 2], [2, 0]))
    logits[0][1, 2] = logits[1][2, :] = value
    logits[1][4, 0] = -math.inf
    experts[0][3, 5] = experts[2][4, 1] = value
    check(found(shim, logits, experts, numbers), [out.double() for out in reference(logits, experts, numbers)])


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    def agrees(*sizes):
        logits, experts, numbers = example(*sizes, wide=True)
        pitch = 12 * sizes[1] + ("aligned" in name)
        experts = [torch.randn(sizes[0] * pitch).as_strided((sizes[0], sizes[1]), (pitch, 1)) for _ in experts]
        logits[0][3] += 200 if name == "no maximum" else 0
        logits[0][3, 1] += 200
        given, expected = found(shim, logits, experts, numbers, seed=5), exact(logits, experts, numbers)
        return all(torch.allclose(*each, 1e-4, 1e-4, equal_nan=True) for each in zip(given, expected, strict=True))

    calls = ((33, 12, ([0, 1, 2], [3, 2], [1, 0])), (7, 20, (list(range(6)), [0, 1])))
    assert any(is_noticed(shim, MUTATIONS, name, partial(agrees, *sizes)) for sizes in calls)


def test_without_a_gpu_it_is_eager_and_with_one_the_kernel(shim, monkeypatch):
    OPERATORS.load()
    logits, experts, numbers = arguments = example(6, 8, ([0, 1, 2], [2, 1]))
    for function in (gpu_mixtures, torch.ops.fxopt.gpu_mixtures):
        check(function(*arguments), reference(*arguments))
    on_the_shim(monkeypatch, shim, (*logits, *experts))
    check(gpu_mixtures(*arguments), reference(*arguments))
    monkeypatch.setattr("fxopt.kernels.cuda_build.loaded", lambda *_: pytest.fail("the kernel serves none of these"))
    double = [each.double() for each in logits], [each.double() for each in experts], numbers
    apart = logits, [each.t().contiguous().t() for each in experts], numbers
    long, many = example(6, 8, ([0, 1] * 9,)), example(6, 8, ([0, 1],) * 17)
    for given in (double, apart, long, many, example(6, 8, (list(range(16)), list(range(16, 32)), [32]))):
        check(gpu_mixtures(*given), reference(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (2048, 128, ([0, 1, 2],) * 2), (4097, 64, (list(range(16)),))])
def test_on_a_gpu(sizes, wide):
    arguments = example(*sizes, device="cuda", wide=wide)
    with torch.no_grad():
        given = [out.double() for out in gpu_mixtures(*arguments)]
    check(given, exact(*arguments))
