"""Dots of pairs: through the shim, whose tensor cores say who holds what, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fxopt
from fxopt.kernels.cuda_build import declared
from fxopt.kernels.field_index import op as field_index
from fxopt.kernels.interactions.cuda.dot_rows import KERNEL, OPERATORS, gpu_dots, parameters, reference
from fxopt.rewrites import dot_rows
from fxopt.rewrites import linear_layers as linears_pass
from fxopt.rewrites.framework.policy import PROVEN
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.planted import awake, planted, run
from tests.cuda.shim_library import ShimError, compile_shim

aten = torch.ops.aten
# What is wrong, where, and what the source says instead where shim::planted is the bug's number.
PAIRS = {
    "no barrier after the loads": (
        *("pairs.cuh", "cuda::wait_copies<0>();\n  __syncthreads();"),
        "cuda::wait_copies<0>();\n  if (!{}) __syncthreads();",
    ),
    "no wait for the loads": (
        "pairs.cuh", "cuda::wait_copies<0>()", "({} ? cuda::wait_copies<1>() : cuda::wait_copies<0>())"
    ),
    "fragments in another order": ("pairs.cuh", "b[1][0], b[0][1]", "b[1 - {}][{}], b[{}][1 - {}]"),
    "columns of the sums swapped": ("pairs.cuh", "rounded(sums[s][0]), K::", "rounded(sums[s][{} ? 1 : 0]), K::"),
    "no check of the pairs": ("pairs.cuh", "return inside ?", "return inside || {} ?"),
    "no mask of the last warps": ("pairs.cuh", "if (!real) return", "if (!real && !{}) return"),
    "fp32: no barrier before the sums": (
        "pairs.cuh", "__syncwarp();  // everybody", "if (!{}) __syncwarp();  // everybody"
    ),
    "fp32: another tile": ("pairs.cuh", "number - a * (a + 1) / 2", "number - a * (a + 1 - {}) / 2"),
}  # fmt: skip
MUTATIONS = PAIRS | {"vectors behind the last": ("dot_rows.cu", "d.row.fields, [&]", "d.row.fields + {}, [&]")}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return with_bugs(KERNEL, tmp_path_factory.mktemp("dots"), MUTATIONS)


def with_bugs(kernel, folder, mutations):
    """A library of this folder for the shim, with every bug planted and asleep."""
    mutations = {name: (f"interactions/cuda/{file}", *changes) for name, (file, *changes) in mutations.items()}
    return declared(kernel, compile_shim(folder, planted(kernel, folder, mutations), "-O1"))


def call(library, z, before, i, j, seed=0, more=0):
    W = before.shape[1] + len(i)
    guarded = torch.full((z.shape[0] + 8, W + more), 7.0, dtype=z.dtype)
    out = guarded[: len(z)]
    run(library, library.fxopt_dots, parameters(z, before, i, j, out), (z, before, i, j), z.dtype, seed)
    assert not out[:, W:].any()
    if not (guarded[len(z) :] == 7).all():
        raise ShimError("a row behind the last")
    return out[:, :W]


def example(dtype, B, F, D, W, device="cpu"):
    pairs = torch.tril_indices(F, F, -1, device=device)
    z, before = torch.randn(B, F, D, device=device).to(dtype), torch.randn(B, W, device=device).to(dtype)
    return z, before, pairs[0].clone(), pairs[1].clone() - F


def exact(z, before, i, j):
    return reference(z.double(), before.double(), i, j, before.shape[1] + len(i))


SIZES = [(1, 27, 64, 64), (3, 5, 16, 3), (2, 32, 128, 1), (7, 16, 48, 0), (5, 1, 80, 2), (0, 3, 16, 2), (4, 17, 16, 40)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "F", "D", "W"), SIZES)
def test_equals_fp64(shim, dtype, B, F, D, W):
    arguments = example(dtype, B, F, D, W)
    found, expected = call(shim, *arguments, more=B * 5).double(), exact(*arguments)
    torch.testing.assert_close(found, expected, rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-4)


def test_any_pairs_in_any_order(shim):
    """More than there are places for in shared memory, and of either side of the diagonal."""
    for dtype in (torch.bfloat16, torch.float32):
        z, before, *_ = example(dtype, 3, 30, 32, 4)
        i, j = (torch.randint(-30, 30, (1300,)) for _ in range(2))
        expected = exact(z, before, i, j)
        torch.testing.assert_close(call(shim, z, before, i, j).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
    z, before, i, j = example(dtype, 2, 27, 32, 3)
    if "pairs" in name:
        i[0] = 31  # behind the vectors: must be NaN
        assert call(shim, z, before, i, j)[:, 3].isnan().all()
    try:
        with awake(shim, MUTATIONS, name):
            found = call(shim, z, before, i, j, seed=3).double()
    except ShimError:
        return
    if "pairs" in name:
        assert not found[:, 3].isnan().any()
        return
    assert not torch.allclose(found, exact(z, before, i, j), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "F", "D", "W"), [(2048, 27, 64, 64), (33, 5, 16, 3), (7, 32, 128, 1), (0, 3, 16, 2), (9, 40, 48, 5)]
)
def test_on_a_gpu(dtype, B, F, D, W):
    arguments = example(dtype, B, F, D, W, "cuda")
    expected = exact(*arguments)
    found = gpu_dots(*arguments, expected.shape[1] + 1).double()
    assert not found[:, -1].any()
    found = found[:, :-1]
    torch.testing.assert_close(found, expected, rtol=max(1e-3, torch.finfo(dtype).eps), atol=1e-3)


@pytest.mark.gpu
def test_a_model_is_rewritten():
    from bench.gpu_cases import dlrm

    case = dlrm(300, torch.bfloat16)
    with torch.no_grad():
        optimized = fxopt.optimize(case.module, case.inputs)
        (found,) = optimized._fxopt.findings
        assert {"gpu_dots", "gpu_linears"} <= {ran.name for ran in found.passes if ran.changes}
        torch.testing.assert_close(optimized(*case.inputs), case.module(*case.inputs), rtol=2e-2, atol=2e-2)


def test_a_layer_behind_an_odd_number_of_dots_reads_zeros_behind_them():
    field_index.OPERATORS.load()

    def model(z, before, weight, bias):
        i, j = (torch.arange(15, device="cuda") % 5 for _ in range(2))
        pairs = aten.index.Tensor(torch.bmm(z, z.transpose(1, 2)), [None, i, j])
        return torch.relu(F.linear(torch.cat([before, pairs], 1), weight, bias))

    module = graph_of(model, [(7, 5, 16), (7, 16), (12, 31), (12,)], torch.bfloat16)
    (pairs,) = module.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    gram, (_, i, j) = pairs.args
    pairs.target, pairs.args = torch.ops.fxopt.pair_select.default, (gram, i, j)
    for found in rewritten(module, dot_rows.REWRITE, linears_pass.REWRITE):
        assert len(found.changes) == 1 and not found.rolled_back
    names = names_of(module)
    assert [n for n in names if "gpu" in n or "pad" in n] == [
        "fxopt.gpu_dots", "fxopt.gpu_padded", "fxopt.gpu_linear"
    ]  # fmt: skip
    (dots,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_dots.default)
    assert dots.meta["val"].shape == (7, 32) and dots.meta["bound"] is gpu_dots


def test_floats_are_for_a_pass_that_times_them_and_are_not_padded():
    field_index.OPERATORS.load()

    def model(z, before, weight, bias):
        i = torch.arange(15, device="cuda") % 5
        pairs = aten.index.Tensor(torch.bmm(z, z.transpose(1, 2)), [None, i, i])
        return torch.relu(F.linear(torch.cat([before, pairs], 1), weight, bias))

    module = graph_of(model, [(7, 5, 16), (7, 16), (12, 31), (12,)])
    (pairs,) = module.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    gram, (_, i, j) = pairs.args
    pairs.target, pairs.args = torch.ops.fxopt.pair_select.default, (gram, i, j)
    halves, floats, _ = rewritten(module, dot_rows.REWRITE, dot_rows.OF_FLOATS, linears_pass.REWRITE)
    assert not halves.changes and len(floats.changes) == 1 and dot_rows.OF_FLOATS.policy is PROVEN
    assert [n for n in names_of(module) if "gpu" in n or "pad" in n] == ["fxopt.gpu_dots", "fxopt.gpu_linear"]


def test_the_operator_gives_eagers_numbers_everywhere():
    OPERATORS.load()
    arguments = *example(torch.float32, 3, 5, 8, 2), 17
    assert torch.equal(torch.ops.fxopt.gpu_dots(*arguments), reference(*arguments))
