"""Products and dots of field pairs on CUDA: the kernel through the shim and on a GPU."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from fxopt.kernels.interactions.cuda.pair_products import KERNEL, OPERATORS, gpu_pairs, parameters, reference
from fxopt.kernels.interactions.serves import MOST_PAIRS
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run, written_alone

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "fields that are not there": ("uint64_t(at) < uint64_t(fields) ?", "{} || uint64_t(at) < uint64_t(fields) ?"),
    "no fields from the end": ("at += at < 0 ? fields : 0;", "at += at < 0 && !{} ? fields : 0;"),
    "not NaN": ("i < 0 || j < 0 ? NAN", "(i < 0 || j < 0) && !{} ? NAN"),
    "no barrier": ("  __syncthreads();\n", "  if (!{}) __syncthreads();\n"),
    "no wait for the copies": ("cuda::wait_copies<0>()", "({} ? cuda::wait_copies<1>() : cuda::wait_copies<0>())"),
    "vectors of another sample": ("(first + int64_t(sample)) *", "({} ? 0 : first + int64_t(sample)) *"),
    "samples behind the last": ("samples = p.samples - first <", "samples = !{} && p.samples - first <"),
    "pairs behind a part's last": ("p.pairs - begin < p.piece ?", "!{} && p.pairs - begin < p.piece ?"),
    "pairs of the first part": ("field_of(p.j, begin + pair", "field_of(p.j, ({} ? 0 : begin) + pair"),
    "the first chunk alone": ("p.fields * p.pitch + chunk;", "p.fields * p.pitch + ({} ? 0 : chunk);"),
    "chunks left out": ("chunk < chunks; chunk++", "chunk < chunks - {}; chunk++"),
    "more at once than is aligned": (" | p.z.strides[0] |", " | ({} ? 0 : p.z.strides[0]) |"),
}  # fmt: skip
SIZES = [  # B, F, D, P
    (33, 26, 16, 325),
    (1, 26, 16, 325),  # pairs in parts
    (0, 3, 4, 3),
    (5, 1, 1, 1),
    (7, 5, 3, 10),
    (40, 12, 10, 66),
    (3, 40, 64, 780),
    (100, 4, 8, 2),  # more samples than a block's threads need
    (2, 7, 256, 21),
    (1, 11, 6, 700),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("pairs"), MUTATIONS, "interactions/cuda/pair_products.cu")


def example(B, F, D, P, device="cpu", wide=False):
    """Indices from either end; samples lie apart where it is wide, and vectors where it is wide and D is odd."""
    z = torch.randn(B, F + wide, D + wide * (D % 2), device=device)[:, :F, :D]
    i, j = (torch.randint(-F, F, (P,), device=device) for _ in range(2))
    return z, i, j


def exact(z, i, j, dots):
    return reference(z.double(), i, j, dots)


def found(library, z, i, j, dots, seed=0):
    expected = exact(z, i.clamp(-z.shape[1], z.shape[1] - 1), j, dots)
    with written_alone(expected.shape) as (out,):
        if out.numel():
            run(library, library.fxopt_pairs, parameters(z, i, j, dots, out), (z, i, j), torch.float32, seed)
    return out.double()


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_fp64(shim, sizes, dots):
    for seed, wide in enumerate((False, True)):
        arguments = *example(*sizes, wide=wide), dots
        torch.testing.assert_close(found(shim, *arguments, seed=seed), exact(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dots", [False, True])
def test_any_alignment(shim, dots):
    memory = torch.randn(4000)
    for offset in range(4):
        z = memory[offset:].as_strided((9, 6, 8), (64, 8, 1))
        arguments = z, *example(9, 6, 8, 15)[1:], dots
        torch.testing.assert_close(found(shim, *arguments), exact(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("bad", [-6, 5, 2**40, -(2**40)])
def test_an_index_outside_gives_nan(shim, bad, dots):
    z, i, j = example(4, 5, 6, 9)
    expected = exact(z, i, j, dots)
    expected[:, 4] = math.nan
    i[4] = bad
    torch.testing.assert_close(found(shim, z, i, j, dots), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_with_their_pairs(shim, value):
    z, i, j = example(5, 4, 8, 6)
    z[2, 1, 3] = value
    for arguments in ((z, i, j, False), (z, i, j, True)):
        torch.testing.assert_close(found(shim, *arguments), exact(*arguments), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    sizes = (1, 11, 6, 700), (33, 5, 12, 10), (3, 6, 4, 900)

    def agrees(B, F, D, P, dots):
        z, i, j = example(B, F, D, P, wide=True)
        if "aligned" in name:
            z = torch.randn(B, F * D + 1).as_strided((B, F, D), (F * D + 1, D, 1))
        expected = exact(z, i, j, dots)
        if "not" in name.lower():
            i[3], expected[:, 3] = F if name == "not NaN" else 2**20, math.nan
        return torch.allclose(found(shim, z, i, j, dots, seed=5), expected, 1e-4, 1e-4, equal_nan=True)

    calls = itertools.product(sizes, (False, True))
    assert any(is_noticed(shim, MUTATIONS, name, partial(agrees, *of, dots)) for of, dots in calls)


def test_without_a_gpu_it_is_eager_and_with_one_the_kernel(shim, monkeypatch):
    OPERATORS.load()
    z, i, j = example(6, 5, 8, 10)
    for dots in (False, True):
        expected = reference(z, i, j, dots)
        assert torch.equal(torch.ops.fxopt.gpu_pairs(z, i, j, dots), expected)
        assert torch.equal(gpu_pairs(z, i, j, dots), expected)
    on_the_shim(monkeypatch, shim, (z, i, j))
    torch.testing.assert_close(gpu_pairs(z, i, j, True), reference(z, i, j, True))
    with monkeypatch.context() as patched:
        patched.setattr("fxopt.kernels.cuda_build.loaded", lambda *_: pytest.fail("the kernel serves none of these"))
        wide, many = example(2, 64, 200, 10), example(2, 3, 4, MOST_PAIRS + 1)
        apart = z.transpose(1, 2).contiguous().transpose(1, 2), i, j
        for given in ((z.double(), i, j), (z, i.int(), j.int()), (z, i, j[:1]), apart, wide, many):
            assert torch.equal(gpu_pairs(*given, False), reference(*given, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (2048, 26, 16, 325), (517, 39, 10, 741), (9, 64, 64, 2016)])
def test_on_a_gpu(sizes, dots):
    for wide in (False, True):
        arguments = *example(*sizes, device="cuda", wide=wide), dots
        with torch.no_grad():
            given = gpu_pairs(*arguments).double()
        torch.testing.assert_close(given, exact(*arguments), rtol=1e-5, atol=1e-4)
