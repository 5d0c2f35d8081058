"""Layers whose inputs are cut among the warps of a block, and cross layers by a matrix, through the shim."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels import cuda_build
from fxopt.kernels.mlp.cuda import cross, linear, sliced, ways
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no wait for copies": ("cuda::wait_copies<kStages - 1>();", "if (!{}) cuda::wait_copies<kStages - 1>();"),
    "copies over what others read": ("sums);\n      __syncwarp();", "sums);\n      if (!{}) __syncwarp();"),
    "no barrier in front of the sums": ("sums);\n  __syncthreads();", "sums);\n  if (!{}) __syncthreads();"),
    "rows behind the last": ("(FULL || first + line < left)", "(FULL || {} || first + line < left)"),
    "inputs behind the last": ("kTile, k < inputs,", "kTile, k < inputs || {},"),
    "inputs behind the last, of few rows": ("count - first, k < inputs,", "count - first, k < inputs || {},"),
    "no check of the rows": ("if (m >= s.m || n >= s.n)", "if ((m >= s.m && !{}) || n >= s.n)"),
    "fragments in another order": ("a[i][0].set(2, low.y)", "a[i][0].set(2, {} ? low.z : low.y)"),
    "a slice that is not summed": ("slice < kSlices; slice++)", "slice < kSlices - {}; slice++)"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(linear.KERNEL, tmp_path_factory.mktemp("sliced"), MUTATIONS, "mlp/cuda/sliced.cuh")


def layer(library, M, N, K, in_tf32, activation="relu", crossed=False, aligned=False, seed=0):
    """What the kernel gives, what it should, and the memory behind the result."""
    stride = K + -K % 4 if aligned else K + 1
    x, weight = (torch.randn(rows, stride)[:, :K] for rows in (M, N))
    bias, (factor, addend) = torch.randn(N), torch.randn(2, M, N) if crossed else (None, None)
    memory = torch.full((M + 40, N), float("nan"))
    arguments = bias, memory[:M], linear.CODES[activation], factor, addend
    words = sliced.parameters(x, weight, *arguments, in_tf32=in_tf32)
    given = [tensor for tensor in (x, weight, bias, factor, addend) if tensor is not None]
    run(library, library.fxopt_linear_sliced, words, given, torch.float32, seed)
    exact = linear.ACTIVATIONS[activation](x.double() @ weight.double().t() + bias.double())
    return memory[:M].double(), exact if factor is None else addend + factor * exact, memory[M:]


@pytest.mark.parametrize("in_tf32", [True, False])
def test_parts_of_the_inputs(library, in_tf32):
    x, weight, memory = torch.randn(33, 208), torch.randn(40, 208), torch.full((4, 33, 40), float("nan"))
    words = sliced.parameters(x[:, :198], weight[:, :198], None, memory[:3], 0, in_tf32=in_tf32, parts=3)
    run(library, library.fxopt_linear_sliced, words, [x, weight], torch.float32)
    for part, found in enumerate(memory[:3]):
        own = slice(part * 66, part * 66 + 66)
        exact = x[:, own].double() @ weight[:, own].double().t()
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=tolerance(in_tf32, 66))
    assert memory[3].isnan().all()


@pytest.mark.parametrize(("inputs", "launches"), [(2**20, 1), (2**28, 0)])
def test_parts_of_lines_too_long_to_count_are_a_batched_product(inputs, launches, monkeypatch):
    taken = []
    monkeypatch.setattr(sliced, "launch_parts", lambda *arguments: taken.append(arguments))
    x, weight, out = (torch.empty(*sizes, device="meta") for sizes in ((2, inputs), (4, inputs), (8, 2, 4)))
    linear.sums_of_parts(None, x, weight, inputs, out)
    assert len(taken) == launches


def tolerance(in_tf32, K):
    return 5e-3 * K**0.5 if in_tf32 else 1e-4


@pytest.mark.parametrize("in_tf32", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "K", "aligned"),
    [(1, 2, 1, False), (33, 70, 429, False), (32, 64, 100, True), (7, 33, 600, True), (64, 5, 129, False)],
)
def test_equals_fp64(library, M, N, K, aligned, in_tf32):
    for activation, crossed in (("relu", False), ("", True)):
        found, exact, behind = layer(library, M, N, K, in_tf32, activation, crossed, aligned)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=tolerance(in_tf32, K))
        assert behind.isnan().all()


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(library, name):
    in_tf32 = name.startswith("fragments")

    def agrees():
        found, exact, behind = layer(library, 33, 40, 601, in_tf32, seed=3)
        close = torch.allclose(found, exact, rtol=1e-5, atol=tolerance(in_tf32, 601))
        return close and bool(behind.isnan().all())

    assert is_noticed(library, MUTATIONS, name, agrees)


def test_the_operator_takes_this_way(library, monkeypatch):
    x, weight, bias = torch.randn(40, 131)[:, :130], torch.randn(33, 130), torch.randn(33)
    x[3, 7], x[4, 2] = float("nan"), float("inf")
    on_the_shim(monkeypatch, library, [x, weight, bias])
    found = linear.gpu_linear(x, weight, bias, "relu")
    exact = linear.reference(x.double(), weight.double(), bias.double(), "relu")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_a_cross_layer_by_a_matrix_is_one_launch(library, monkeypatch):
    x0, x, weight, scale = torch.randn(40, 90), torch.randn(40, 91)[:, :90], torch.randn(90, 90), torch.randn(90)
    on_the_shim(monkeypatch, library, [x0, x, weight, scale])
    for bias in (scale, None):
        found = cross.gpu_cross(x0, x, weight, bias, None)
        exact = cross.reference(*(t if t is None else t.double() for t in (x0, x, weight, bias, None)))
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)


def test_a_cross_layer_of_many_rows_is_a_product_and_a_sum(monkeypatch):
    monkeypatch.setattr(cuda_build, "loaded", lambda library, device: None)
    x0, x, weight = torch.randn(9, 70), torch.randn(9, 70), torch.randn(70, 70)
    torch.testing.assert_close(cross.gpu_cross(x0, x, weight, None, None), x0 * (x @ weight.t()) + x)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_which_sizes_take_this_way(precision, monkeypatch):
    monkeypatch.setattr(ways, "tf32", lambda: precision == "tf32")
    assert ways.is_sliced(256, 429, 429, aligned=False) and ways.is_sliced(256, 128, 256, aligned=True)
    assert ways.is_sliced(20, 64, 128, aligned=True) and not ways.is_sliced(1, 64, 128, aligned=True)
    assert ways.is_sliced(8, 64, 128, aligned=True) is (precision == "tf32")
    assert not ways.is_sliced(2048, 512, 512, aligned=True) and not ways.is_sliced(256, 64, 5000, aligned=True)
