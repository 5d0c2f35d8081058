"""Dots of pairs on tensor cores: through the shim, whose product says who holds what, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fxopt
from fxopt.kernels.field_index import op as field_index
from fxopt.kernels.gpu_dots.op import KERNEL, gpu_dots, load, parameters, reference
from fxopt.rewrites import gpu_dots as dots_pass
from fxopt.rewrites import gpu_linears as linears_pass
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.planted import awake, compiled, run
from tests.cuda.shim_library import ShimError

aten = torch.ops.aten
# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier after the loads": (
        "{0, 0, 0, 0};\n  }\n  __syncwarp();",
        "{0, 0, 0, 0};\n  }\n  if (!{}) __syncwarp();",
    ),
    "fragments in another order": ("two(field + 8, pair);", "two(field + ({} ? 0 : 8), pair + ({} ? 8 : 0));"),
    "columns of the sums swapped": ("[n * 8 + pair + u % 2] =", "[n * 8 + pair + ({} ? 1 - u % 2 : u % 2)] ="),
    "no zeros behind the vectors": ("field < d.fields ?", "field < d.fields || {} ?"),
    "no check of the pairs": ("inside ? gram[i][j] : NAN", "inside || {} ? gram[i][j] : NAN"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("dots"), MUTATIONS, "gpu_dots/dots.cu")


def call(library, z, before, i, j, seed=0, more=0):
    W = before.shape[1] + len(i)
    out = torch.full((z.shape[0], W + more), 7.0, dtype=z.dtype)
    run(library, library.fxopt_dots, parameters(z, before, i, j, out), (z, before, i, j), z.dtype, seed)
    assert not out[:, W:].any()
    return out[:, :W]


def example(dtype, B, F, D, W, device="cpu"):
    pairs = torch.tril_indices(F, F, -1, device=device)
    z, before = torch.randn(B, F, D, device=device).to(dtype), torch.randn(B, W, device=device).to(dtype)
    return z, before, pairs[0].clone(), pairs[1].clone() - F


def exact(z, before, i, j):
    return reference(z.double(), before.double(), i, j, before.shape[1] + len(i))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "F", "D", "W"), [(1, 27, 64, 64), (3, 5, 16, 3), (2, 32, 128, 1)])
def test_equals_fp64(shim, dtype, B, F, D, W):
    arguments = example(dtype, B, F, D, W)
    found, expected = call(shim, *arguments, more=B * 5).double(), exact(*arguments)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    z, before, i, j = example(torch.bfloat16, 2, 27, 32, 3)
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
    field_index.load()

    def model(z, before, weight, bias):
        i, j = (torch.arange(15, device="cuda") % 5 for _ in range(2))
        pairs = aten.index.Tensor(torch.bmm(z, z.transpose(1, 2)), [None, i, j])
        return torch.relu(F.linear(torch.cat([before, pairs], 1), weight, bias))

    module = graph_of(model, [(7, 5, 16), (7, 16), (12, 31), (12,)], torch.bfloat16)
    (pairs,) = module.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    gram, (_, i, j) = pairs.args
    pairs.target, pairs.args = torch.ops.fxopt.pair_select.default, (gram, i, j)
    for found in rewritten(module, dots_pass.REWRITE, linears_pass.REWRITE):
        assert len(found.changes) == 1 and not found.rolled_back
    names = names_of(module)
    assert [n for n in names if "gpu" in n or "pad" in n] == [
        "fxopt.gpu_dots", "fxopt.gpu_padded", "fxopt.gpu_linear"
    ]  # fmt: skip
    (dots,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_dots.default)
    assert dots.meta["val"].shape == (7, 32) and dots.meta["bound"] is gpu_dots


def test_the_operator_gives_eagers_numbers_everywhere():
    load()
    arguments = *example(torch.float32, 3, 5, 8, 2), 17
    assert torch.equal(torch.ops.fxopt.gpu_dots(*arguments), reference(*arguments))
