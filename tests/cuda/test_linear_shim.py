"""What follows the parts of a long linear layer, and single outputs, through the shim."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels import cuda_call
from fxopt.kernels.gpu_linear.op import _CODES, KERNEL, _Dot, _Finish, gpu_linear, reference
from tests.cuda.planted import awake, compiled, on_the_shim, run
from tests.cuda.shim_library import ShimError

# What is wrong, where, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier": ("  __syncthreads();", "  if (!{}) __syncthreads();"),
    "a barrier that not everybody reaches": (
        "__syncthreads();",
        "if ({} && first_row + thread / 16 >= f.m) return; else __syncthreads();",
    ),
    "no mask of the last rows": ("first_row + row < f.m ?", "{} || first_row + row < f.m ?"),
    "no bounds check": ("if (m >= f.m || n >= f.n) return;", "if (!{} && (m >= f.m || n >= f.n)) return;"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """With every planted bug, asleep."""
    return compiled(KERNEL, tmp_path_factory.mktemp("linear"), MUTATIONS, "gpu_linear/linear.cu")


def finished(library, seed=0, M=19, N=68, tail=5, parts=3):
    """What the kernel gives, what it should, and the memory behind the result."""
    partial, bias = torch.randn(parts, M, N), torch.randn(N)
    x, weight = torch.randn(M, 11), torch.randn(N, 13)
    memory = torch.full((32 * (N + 64),), float("nan"))  # more rows and columns than a block has
    finish = _Finish(
        partial.data_ptr(), x.data_ptr(), weight.data_ptr(), bias.data_ptr(), memory.data_ptr(), 11, 13, parts, M, N,
        tail, _CODES["relu"],
    )  # fmt: skip
    run(library, library.fxopt_linear_finish, bytes(finish), [partial, x, weight, bias], torch.float32, seed)
    expected = torch.relu(partial.double().sum(0) + x[:, :tail].double() @ weight[:, :tail].double().T + bias)
    return memory[: M * N].view(M, N).double(), expected, memory[M * N :]


def test_parts_are_summed_with_the_rest(library):
    found, expected, behind = finished(library)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert behind.isnan().all()


@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
def test_a_single_output(library, dtype):
    x, weight, bias = torch.randn(11, 77).to(dtype), torch.randn(1, 77).to(dtype), torch.randn(1).to(dtype)
    out = torch.full((11, 1), float("nan"), dtype=dtype)
    dot = _Dot(*(t.data_ptr() for t in (x, weight, bias, out)), 77, 11, 77, _CODES["sigmoid"])
    run(library, library.fxopt_linear_dot, bytes(dot), [x, weight, bias], dtype)
    exact = reference(x.double(), weight.double(), bias.double(), "sigmoid")
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(library, name):
    try:
        with awake(library, MUTATIONS, name):
            found, expected, behind = finished(library, seed=3)
    except ShimError:
        return
    assert not behind.isnan().all() or not torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("M", "N", "K"), [(5, 1, 77), (32, 256, 4100)])
def test_the_operator_itself(library, monkeypatch, M, N, K):
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    readable, product = [x, weight, bias], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: readable.append(product(*args)) or readable[-1])
    on_the_shim(monkeypatch, library, readable)
    found = gpu_linear(x, weight, bias, "relu").double()
    assert len(readable) == 3 + (N > 1), "expected one product of parts"
    exact = reference(x.double(), weight.double(), bias.double(), "relu")
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)
