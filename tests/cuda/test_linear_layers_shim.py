"""Short dot products, what follows the parts of long ones, single outputs and padded copies, through the shim."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels import cuda_build, cuda_call
from fxopt.kernels.mlp.cuda import joined, linear, ways
from fxopt.kernels.mlp.cuda.linear import KERNEL, gpu_linear, gpu_linears, gpu_padded, reference
from tests.cuda.planted import awake, on_the_shim, planted, run
from tests.cuda.shim_library import ShimError, compile_shim

SHORT, HALVES, DOTS = "mlp/cuda/short.cuh", "mlp/cuda/short_halves.cuh", "mlp/cuda/dots.cuh"
LAST = "mlp/cuda/last.cuh"
# What is wrong, where, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier": (SHORT, "  __syncthreads();", "  if (!{}) __syncthreads();"),
    "a barrier that some miss": (SHORT, "__syncthreads();", "if ({} && m >= s.m) return; else __syncthreads();"),
    "no mask of the last rows": (SHORT, "column < 0 ? first_row", "column < 0 ? {} || first_row"),
    "no mask of the last inputs": (SHORT, "own + e * kEight < s.k ?", "(own + e * kEight < s.k || {}) ?"),
    "no check of the rows": (SHORT, "if (m + r < s.m)", "if (m + r < s.m || {})"),
    "no check of the columns": (SHORT, "if (left <= 0) return;", "if (left <= 0 && !{}) return;"),
    "halves: no mask of the last inputs": (HALVES, "& mask[second];", "& ({} ? ~0u : mask[second]);"),
    "halves: inputs behind the last": (HALVES, "own < size ?", "own < size + {} ?"),
    "halves: rows behind the last": (SHORT, "row < rows ?", "row < rows || {} ?"),
    "halves: fragments in another order": (HALVES, "* 2 + u % 2], u / 2)", "* 2 + ({} ? u / 2 : u % 2)], u / 2)"),
    "halves: no check of the rows": (HALVES, "if (m < s.m)", "if (m < s.m || {})"),
    "dots: no check of the rows": (DOTS, "if (row >= d.m) return;", "if (row >= d.m && !{}) return;"),
    "dots: rows behind the last": (DOTS, "row_or_last(first + r, d.m)", "row_or_last(first + r, d.m + ({} ? 9 : 0))"),
    "dots: chunks behind the last": (DOTS, "< d.k ? some : 0.0f", "< d.k || {} ? some : 0.0f"),
    "dots: no barrier": (DOTS, "    __syncthreads();", "    if (!{}) __syncthreads();"),
    "last: no check of the rows": (LAST, "if (row >= s.m)", "if (row >= s.m && !{})"),
    "last: parts that are none": (LAST, "if (part < s.parts)", "if (part < s.parts || {})"),
    "last: columns behind the last": (LAST, "n < s.n;", "n < s.n + 4 * {};"),
    "last: a warp that is not summed": (LAST, "found[0] = summed(found[0]);", "if (!{}) found[0] = summed(found[0]);"),
    "halves: columns of another thread": (HALVES, "+ group % 2, n =", "+ ({} ? 1 - group % 2 : group % 2), n ="),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """With every planted bug, asleep."""
    folder = tmp_path_factory.mktemp("linear")
    return cuda_build.declared(KERNEL, compile_shim(folder, planted(KERNEL, folder, MUTATIONS)))


def some(rows, columns, dtype, stride):
    """A matrix of rows further apart than they are long."""
    return torch.randn(rows * stride).to(dtype).as_strided((rows, columns), (stride, 1))


def short(library, M, N, K, dtype, activation="relu", bias=True, tall=False, seed=0, parts=0):
    """What the kernel gives, what it should, and the memory behind the result."""
    x, weight = some(M, K, dtype, K + 3), some(N, K, dtype, K + 1)
    b = torch.randn(N).to(dtype) if bias else None
    partial = torch.randn(parts, M, N)
    memory = torch.full((M + 200, N), float("nan"), dtype=dtype)  # more rows than a block has
    words = linear.short(x, weight, b, memory[:M], activation, partial if parts else None, tall)
    given = [t for t in (x, weight, b, partial) if t is not None]
    run(library, library.fxopt_linear_finish if parts else library.fxopt_linear_short, words, given, dtype, seed)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    return memory[:M].double(), linear.ACTIVATIONS[activation](exact + partial.double().sum(0)), memory[M:]


@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 2, 1), (17, 33, 13), (70, 40, 16), (3, 64, 64), (129, 36, 37)])
def test_short_dot_products(library, M, N, K, tall, dtype):
    for activation, bias in (("", True), ("relu", True), ("sigmoid", False)):
        found, exact, behind = short(library, M, N, K, dtype, activation, bias, tall)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, exact, rtol=max(eps, 1e-5), atol=1e-5)
        assert behind.isnan().all()


@pytest.mark.parametrize(("M", "N", "K", "parts"), [(19, 68, 5, linear.PARTS), (16, 32, 63, 3), (33, 4, 0, 1)])
def test_parts_are_summed_with_the_rest(library, M, N, K, parts):
    found, exact, behind = short(library, M, N, K, torch.float32, parts=parts)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert behind.isnan().all()


def test_nan_passes_a_relu_and_nothing_else_becomes_one(library, monkeypatch):
    for dtype in cuda_call.DTYPES:
        x, weight = torch.randn(9, 13).to(dtype), torch.randn(5, 13).to(dtype)
        x[3, 2], x[4, 12], weight[1, 12] = float("nan"), float("inf"), float("inf")
        on_the_shim(monkeypatch, library, [x, weight])
        found = gpu_linear(x, weight, None, "relu")
        expected = reference(x.double(), weight.double(), None, "relu")
        assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())


def dots(library, M, K, dtype, stride, bias=1, seed=0):
    """What the kernel gives, what it should, and the memory behind the result."""
    rows, vector = some(M, K, dtype, stride), some(1, K, dtype, stride)
    b = torch.randn(bias).to(dtype) if bias else None
    memory = torch.full((M + 16,), float("nan"), dtype=dtype)
    words = linear.dots(rows, vector, b, memory, "sigmoid")
    run(library, library.fxopt_linear_dots, words, [rows, vector] + ([b] if bias else []), dtype, seed)
    exact = torch.sigmoid(rows.double() @ vector[0].double() + (b.double() if bias else 0))
    return memory[:M].double(), exact, memory[M:]


@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
@pytest.mark.parametrize(
    ("M", "K", "stride"), [(11, 77, 80), (9, 24, 24), (1, 1, 1), (5, 2056, 2056), (6, 2049, 2050), (3, 0, 1)]
)
def test_dot_products_one_by_one(library, dtype, M, K, stride):
    for bias in (0, 1, M):
        found, exact, behind = dots(library, M, K, dtype, stride, bias)
        torch.testing.assert_close(found, exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert behind.isnan().all()


@pytest.mark.parametrize("dtype", ways.HALVES)
@pytest.mark.parametrize(("M", "K", "width"), [(1, 1, 8), (7, 415, 416), (33, 17, 40), (3, 8, 8), (2, 0, 8)])
def test_padded_copies(library, monkeypatch, M, K, width, dtype):
    x = some(M, K, dtype, K + 3)
    on_the_shim(monkeypatch, library, [x])
    found = gpu_padded(x, width)
    assert torch.equal(found[:, :K], x) and not found[:, K:].any() and found.shape == (M, width)


def last(library, M, N, K, parts, activation="relu", bias=True, seed=0):
    """The same of a layer in parts and the single output behind it."""
    x, weight, vector, partial = (
        some(M, K, torch.float32, K + 3),
        torch.randn(N, K),
        torch.randn(1, N),
        torch.randn(parts, M, N),
    )
    b, one = (torch.randn(N), torch.randn(1)) if bias else (None, None)
    memory = torch.full((M + 16, 1), float("nan"))
    words = linear.last(linear.short(x, weight, b, memory, activation, partial), vector, one, "sigmoid", memory)
    given = [t for t in (x, weight, b, partial, vector, one) if t is not None]
    run(library, library.fxopt_linear_last, words, given, torch.float32, seed)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    exact = linear.ACTIVATIONS[activation](exact + partial.double().sum(0)) @ vector.double().t() + (
        one.double() if bias else 0
    )
    return memory[:M].double(), torch.sigmoid(exact), memory[M:]


@pytest.mark.parametrize(("M", "N", "K", "parts"), [(19, 132, 5, linear.PARTS), (1, 4, 0, 1), (6, 260, 63, 3)])
def test_a_single_output_behind_parts(library, M, N, K, parts):
    for activation, bias in (("relu", True), ("", False), ("sigmoid", True)):
        found, exact, behind = last(library, M, N, K, parts, activation, bias)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        assert behind.isnan().all()


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(library, name):
    halves = name.startswith("halves")
    try:
        with awake(library, MUTATIONS, name):
            if name.startswith("dots"):
                found, exact, behind = dots(library, 13, 1100, torch.float32, 1100, seed=3)
            elif name.startswith("last"):
                found, exact, behind = last(library, 19, 132, 5, 7, seed=3)
            elif halves:
                found, exact, behind = short(library, 19, 72, 13, torch.bfloat16, seed=3)
            else:
                found, exact, behind = short(library, 19, 68, 5, torch.float32, seed=3, parts=linear.PARTS)
    except ShimError:
        return
    tolerance = 1e-2 if halves else 1e-5
    assert not behind.isnan().all() or not torch.allclose(found, exact, rtol=tolerance, atol=tolerance)


def named_sums(monkeypatch, readable):
    """Kernels may read the sums of parts and what they are made of; the list of these sums."""
    made, sums = [], linear.sums_of_parts

    def named(kernel, x, weight, done, out):
        readable.append(weight)
        sums(kernel, x, weight, done, out)
        readable.append(out)
        made.append(out)

    monkeypatch.setattr(linear, "sums_of_parts", named)
    return made


@pytest.mark.parametrize(
    ("M", "N", "K"), [(5, 1, 77), (32, 256, 4100), (5, 12, 13), (0, 12, 13), (3, 4, 99), (1, 9, 99)]
)
def test_the_operator_itself(library, monkeypatch, M, N, K):
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    readable = [x, weight, bias]
    products = named_sums(monkeypatch, readable)
    on_the_shim(monkeypatch, library, readable)
    found = gpu_linear(x, weight, bias, "relu").double()
    assert len(products) == (K > 4096)
    exact = reference(x.double(), weight.double(), bias.double(), "relu")
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_columns_that_are_not_side_by_side_are_left_to_torch(library, monkeypatch):
    on_the_shim(monkeypatch, library, [])  # nothing may be read
    x, weight = torch.randn(13, 6).t(), torch.randn(13, 4).t()
    torch.testing.assert_close(gpu_linear(x, weight, None, ""), x @ weight.t())


def test_a_layer_of_no_inputs_has_its_activation(monkeypatch):
    """torch's fused one on CUDA forgets it there."""
    monkeypatch.setattr(torch, "_addmm_activation", torch.addmm)
    monkeypatch.setattr(cuda_build, "loaded", lambda library, device: None)
    bias = torch.tensor([-1.0, 2.0])
    found = gpu_linear(torch.empty(3, 0), torch.empty(2, 0), bias, "relu")
    torch.testing.assert_close(found, bias.relu().expand(3, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_a_single_output_is_made_with_the_parts_in_front_of_it(library, monkeypatch, bias):
    x, weights = torch.randn(40, 4100), [torch.randn(256, 4100) / 64, torch.randn(1, 256) / 16]
    biases = [torch.randn(256) if bias else None, torch.randn(1)]
    readable = [x, *weights, *(b for b in biases if b is not None)]
    named_sums(monkeypatch, readable)
    on_the_shim(monkeypatch, library, readable)  # a launch of its own would read a result that is not among these
    found = gpu_linears(x, weights, biases, ["relu", "sigmoid"]).double()
    exact = reference(x.double(), weights[0].double(), None if biases[0] is None else biases[0].double(), "relu")
    exact = reference(exact, weights[1].double(), biases[1].double(), "sigmoid")
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("M", [40, 600])
@pytest.mark.parametrize("widths", [(2001, 13), (5, 2056, 3), (1032, 1500), (1024,)])
def test_long_pieces_are_multiplied_as_they_lie(library, monkeypatch, widths, M):
    """40 rows in parts, 600 in one product a piece."""
    pieces = [torch.randn(M, width + (width < 99))[:, :width] for width in widths]
    weight, bias = torch.randn(68, sum(widths)), torch.randn(68)
    exact = torch.relu(torch.cat(pieces, 1).double() @ weight.double().t() + bias.double())
    readable, join = [*pieces, weight, bias], torch.cat

    def cat(*args):
        readable.append(join(*args))
        return readable[-1]

    monkeypatch.setattr(torch, "cat", cat)
    products = named_sums(monkeypatch, readable)
    on_the_shim(monkeypatch, library, readable)
    found = joined.gpu_joined_linear(pieces, weight, bias, "relu").double()
    assert len(products) == sum(width > 99 for width in widths)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_pieces_that_do_not_fit_are_joined(monkeypatch):
    monkeypatch.setattr(cuda_build, "loaded", lambda library, device: None)
    for widths, M in (((2001, 13), 3), ((2001, 80), 40), ((13, 14), 40)):
        pieces, weight = [torch.randn(M, width) for width in widths], torch.randn(7, sum(widths))
        assert torch.equal(
            joined.gpu_joined_linear(pieces, weight, None, ""), joined.reference(pieces, weight, None, "")
        )
