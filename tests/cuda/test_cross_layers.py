"""Cross layers on CUDA: which are found, and the kernel through the shim and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxopt.kernels import cuda_call
from fxopt.kernels.mlp.cuda.cross import KERNEL, OPERATORS, gpu_cross, parameters, reference
from fxopt.rewrites import cross_layers, linear_layers
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.planted import awake, compiled, on_the_shim, run
from tests.cuda.shim_library import ShimError

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no check of the rows": ("if (row >= c.rows) return;", "if (row >= c.rows && !{}) return;"),
    "a lane's part of the sum": ("sum = summed(sum);", "sum = {} ? sum : summed(sum);"),
    "columns behind the last": ("k < c.columns; k += 32)\n", "k < c.columns + {}; k += 32)\n"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("cross"), MUTATIONS, "mlp/cuda/cross.cu")


def example(M, K, dtype, device="cpu"):
    def some(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    return some(M, K), some(M, 2 * K)[:, ::2], some(1, K) / K**0.5, some(1), some(1, K)


def found(library, x0, x, weight, scale, bias, seed=0):
    memory = torch.full((len(x) + 8, x.shape[1]), float("nan"), dtype=x.dtype)
    packed = parameters(x0, x, weight, scale, bias, memory[: len(x)])
    given = [tensor for tensor in (x0, x, weight, scale, bias) if tensor is not None]
    run(library, library.fxopt_cross, packed, given, x.dtype, seed)
    assert memory[len(x) :].isnan().all()
    return memory[: len(x)].double()


def exact(*tensors):
    return reference(*(None if tensor is None else tensor.double() for tensor in tensors))


@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
@pytest.mark.parametrize(("M", "K"), [(1, 1), (9, 77), (0, 5)])
def test_equals_fp64(shim, dtype, M, K):
    x0, x, weight, scale, bias = example(M, K, dtype)
    rtol = max(1e-5, torch.finfo(dtype).eps)
    for vectors in ((scale, bias), (None, bias.view(-1)), (scale, None)):
        given = found(shim, x0, x, weight, *vectors)
        torch.testing.assert_close(given, exact(x0, x, weight, *vectors), rtol=rtol, atol=1e-5)


def test_the_operator_on_the_shim(shim, monkeypatch):
    arguments = example(5, 33, torch.float32)
    on_the_shim(monkeypatch, shim, arguments)
    torch.testing.assert_close(gpu_cross(*arguments).double(), exact(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    arguments = example(5, 64, torch.float32)
    try:
        with awake(shim, MUTATIONS, name):
            given = found(shim, *arguments)
    except (ShimError, AssertionError):
        return
    assert not torch.allclose(given, exact(*arguments), rtol=1e-4, atol=1e-4)


def vectors(x0, a, b, bias):
    x = x0
    for weight in (a, b):
        x = x0 * F.linear(x, weight) + bias + x
    return x


def matrices(x0, a, b, bias):
    x = x + x0 * F.linear(x, a, bias) if (x := x0) is not None else x
    return x0 * F.linear(x, b, bias) + x


def low_ranks(x0, a, b, bias):
    x = x0 * F.linear(F.linear(x0, a), b.t(), bias) + x0
    return x0 * F.linear(F.linear(x, a), b.t(), bias) + x


def test_all_versions_are_found():
    cases = (vectors, 1, "fxopt.gpu_cross"), (matrices, 8, "fxopt.gpu_cross"), (low_ranks, 3, "aten.addcmul")
    for function, rows, name in cases:
        module = graph_of(function, [(7, 8), (rows, 8), (rows, 8), (8,)])
        *_, crosses = rewritten(module, linear_layers.REWRITE, cross_layers.REWRITE)
        names = names_of(module)
        assert names.count(name) == 2 and not {"aten.mul.Tensor", "aten.add.Tensor"} & set(names), names
        assert not crosses.rolled_back


def test_what_is_read_elsewhere_or_has_other_factors_stays():
    def scaled(x0, a, b, bias):
        return torch.add(x0 * F.linear(x0, a), x0, alpha=2)

    def read_twice(x0, a, b, bias):
        scale = F.linear(x0, a)
        return x0 * scale + x0, scale

    for function in (scaled, read_twice):
        module = graph_of(function, [(7, 8), (1, 8), (1, 8), (8,)])
        (crosses,) = rewritten(module, cross_layers.REWRITE)
        assert not crosses.changes


def test_the_operator_gives_eagers_numbers_everywhere():
    OPERATORS.load()
    arguments = example(3, 5, torch.float32)
    torch.testing.assert_close(torch.ops.fxopt.gpu_cross(*arguments), reference(*arguments))
    assert torch.equal(gpu_cross(*arguments), reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
@pytest.mark.parametrize(("M", "K"), [(1, 1), (3000, 429), (0, 5)])
def test_on_a_gpu(dtype, M, K):
    arguments = example(M, K, dtype, "cuda")
    with torch.no_grad():
        given = gpu_cross(*arguments).double()
    rtol = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(given, exact(*arguments), rtol=rtol, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K"), [(256, 429), (3000, 70), (1, 40), (0, 90)])
def test_by_a_matrix_on_a_gpu(M, K):
    x0, x, weight, scale = (torch.randn(*size, device="cuda") for size in ((M, K), (M, K), (K, K), (K,)))
    weight /= K**0.5
    with torch.no_grad():
        given = gpu_cross(x0, x, weight, scale, None).double()
    torch.testing.assert_close(given, exact(x0, x, weight, scale, None), rtol=1e-5, atol=1e-4)
