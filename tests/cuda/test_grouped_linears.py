"""Small products with a matrix each on CUDA: which are found, and the kernel through the shim and on a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fxopt.kernels.mlp.cuda.grouped import KERNEL, OPERATORS, gpu_grouped, parameters, reference
from fxopt.rewrites import contractions, grouped_linears, repeated
from tests.cuda.on_a_gpu import names_of, rewritten
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run, written_alone
from tests.cuda.pretended import constants_on_cuda, traced

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "entries that are not there": ("uint64_t(at) < uint64_t(count) ?", "{} || uint64_t(at) < uint64_t(count) ?"),
    "a matrix of another lane": ("entry(g.of_weight, first + lane,", "entry(g.of_weight, first + ({} ? 0 : lane),"),
    "no zeros behind the inputs": ("real ? weight : 0.0f", "real || {} ? weight : 0.0f"),
    "inputs behind the last": ("at + k < count ?", "at + k < count || {} ?"),
    "outputs behind the last": ("if (n + k < N) out", "if (n + k < N || {}) out"),
    "no barrier": ("  __syncthreads();\n", "  if (!{}) __syncthreads();\n"),
    "rows behind the last": ("if (row >= g.rows) return;", "if (row >= g.rows && !{}) return;"),
    "lanes behind the last": ("if (lane >= live ||", "if ((lane >= live && !{}) ||"),
    "factors of another row": ("vector_of(g.y, row,", "vector_of(g.y, {} ? 0 : row,"),
    "an unknown factor": ("|| factor < 0", "|| (factor < 0 && !{})"),
}  # fmt: skip
SIZES = [
    (33, 7, 9, 45, 16, 16),  # 16 bytes at a time, lanes in tiles
    (1, 1, 1, 1, 1, 1),
    (5, 4, 3, 10, 7, 5),
    (70, 3, 2, 3, 64, 64),
    (300, 3, 2, 9, 20, 4),  # more rows than a block computes at once
    (0, 3, 3, 5, 8, 8),
    (9, 2, 4, 20, 3, 12),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("grouped"), MUTATIONS, "mlp/cuda/grouped.cu")


def example(B, vectors, matrices, lanes, K, N, times=True, device="cpu", turned=False):
    """x and y are not contiguous where K or N is odd; the matrices may be [N, K]."""

    def some(*shape):
        wide = torch.randn(*shape[:-1], shape[-1] * (1 + shape[-1] % 2), device=device)
        return wide[..., : shape[-1]]

    def entries(count):
        return torch.randint(count, (lanes,), device=device)

    weight = some(matrices, N, K).transpose(1, 2) if turned else some(matrices, K, N)
    y = some(B, vectors + 1, N) if times else None
    return (
        some(B, vectors, K), weight, y, entries(vectors), entries(matrices), entries(vectors + 1) if times else None,
    )  # fmt: skip


def exact(*arguments):
    return reference(*(t.double() if t is not None and t.is_floating_point() else t for t in arguments))


def found(library, *arguments, seed=0):
    return found_of_shape(exact(*arguments).shape, library, *arguments, seed=seed)


def found_of_shape(shape, library, *arguments, seed=0):
    """The same of lists whose entries may not be there."""
    with written_alone(shape) as (out,):
        packed = parameters(*arguments[:3], arguments[3:], out)
        run(library, library.fxopt_grouped, packed, [t for t in arguments if t is not None], torch.float32, seed)
    return out.double()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_fp64(shim, sizes, turned):
    for seed, times in enumerate((True, False)):
        arguments = example(*sizes, times=times, turned=turned)
        torch.testing.assert_close(found(shim, *arguments, seed=seed), exact(*arguments), rtol=1e-5, atol=1e-5)


def test_without_lists_each_lane_takes_its_entry(shim, monkeypatch):
    x, weight, y = torch.randn(5, 6, 4), torch.randn(6, 4, 8), torch.randn(5, 6, 8)
    on_the_shim(monkeypatch, shim, (x, weight, y))
    given = gpu_grouped(x, weight, y, None, None, None).double()
    torch.testing.assert_close(given, exact(x, weight, y, None, None, None), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError):
        gpu_grouped(x, weight[:5], y, None, None, None)


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
@pytest.mark.parametrize("place", [3, 4, 5])
def test_an_entry_that_is_not_there_gives_nan(shim, place, bad):
    arguments = example(5, 3, 3, 9, 4, 4)
    x, weight, y, *places = arguments
    expected = exact(*arguments)
    expected[:, 4] = math.nan
    lists = [each.clone() for each in places]
    lists[place - 3][4] = bad if place != 5 or bad != 3 else 4
    given = found_of_shape(expected.shape, shim, x, weight, y, *lists)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_in_their_rows(shim, value):
    arguments = example(9, 3, 3, 9, 5, 6)
    arguments[0][4, 1, 2] = value
    torch.testing.assert_close(found(shim, *arguments), exact(*arguments), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    def agrees(*sizes):
        arguments = example(*sizes)
        arguments[1][0, 0, 0] = math.inf
        expected, lists = exact(*arguments), [each.clone() for each in arguments[3:]]
        if name in ("entries that are not there", "an unknown factor"):
            lists[2 if "factor" in name else 0][2], expected[:, 2] = 2**40, math.nan
        given = found_of_shape(expected.shape, shim, *arguments[:3], *lists)
        return torch.allclose(given, expected, 1e-4, 1e-4, equal_nan=True)

    calls = ((9, 3, 3, 9, 5, 6), (9, 3, 3, 9, 8, 8), (300, 3, 3, 30, 4, 16))
    assert any(is_noticed(shim, MUTATIONS, name, partial(agrees, *sizes)) for sizes in calls)


PAIRS = [(i, j) for i in range(5) for j in range(i)]


def bilinear(x, *weights):
    rows = [F.linear(x[:, i], weight) * x[:, j] for weight, (i, j) in zip(weights, PAIRS, strict=True)]
    return torch.stack(rows, 1)


def selected(x, weight, i, j):
    return (torch.matmul(x.index_select(1, i).unsqueeze(2), weight).squeeze(2) * x.index_select(1, j)).flatten(1)


def read_in_other_orders(x, weight, i):
    """As contractions leave it: copies into the order of the lanes, and back."""
    products = torch.bmm(x.index_select(1, i).permute(1, 0, 2), weight)
    rows = products.permute(1, 0, 2).contiguous()
    return rows.reshape(-1, len(weight), 1, 4).contiguous().squeeze(2).flatten(1) * 2


def of_each_field(x, weight):
    return torch.einsum("bfk,fkn->bfn", x, weight).contiguous()


def pairs():
    return [torch.tensor(each) for each in zip(*PAIRS, strict=True)]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (bilinear, [torch.randn(7, 5, 4), *torch.randn(10, 4, 4)]),
        (selected, [torch.randn(7, 5, 4), torch.randn(10, 4, 4), *pairs()]),
        (of_each_field, [torch.randn(7, 5, 4), torch.randn(5, 4, 3)]),
    ],
)
def test_what_is_found_gives_eagers_numbers(function, inputs):
    module = traced(function, inputs)
    for weight in module.graph.find_nodes(op="placeholder")[1:] if function is bilinear else ():
        weight.meta["state"] = weight.name
    with constants_on_cuda():
        *_, ran = rewritten(module, contractions.CONTRACTIONS, repeated.REWRITE, grouped_linears.REWRITE)
    assert ran.changes and not ran.rolled_back
    names = names_of(module)
    assert names.count("fxopt.gpu_grouped") == 1 and not {"aten.bmm", "aten.index_select", "aten.mul.Tensor"} & {*names}
    torch.testing.assert_close(module(*inputs), function(*inputs))


def test_no_copies_are_left_that_only_change_strides():
    inputs = [torch.randn(7, 5, 4), torch.randn(10, 4, 4), pairs()[0]]
    module = traced(read_in_other_orders, inputs)
    (ran,) = rewritten(module, grouped_linears.REWRITE)
    assert ran.changes and names_of(module) == ["fxopt.gpu_grouped", "aten.reshape", "aten.mul.Tensor"]
    torch.testing.assert_close(module(*inputs), read_in_other_orders(*inputs))


def test_what_is_wide_edited_or_adds_a_bias_stays():
    def edited(x, weight):
        y = torch.einsum("bfk,fkn->bfn", x, weight)
        x.zero_()
        return y

    def biased(x, weight):
        return torch.baddbmm(torch.ones(4), x.transpose(0, 1), weight)

    for function, width in ((edited, 4), (biased, 4), (of_each_field, 65)):
        module = traced(function, [torch.randn(7, 5, width), torch.randn(5, width, 4)])
        (ran,) = rewritten(module, grouped_linears.REWRITE)
        assert not ran.changes


def test_nothing_is_found_where_gradients_are_recorded():
    module = traced(of_each_field, [torch.randn(7, 5, 4), torch.randn(5, 4, 3)])
    (ran,) = rewritten(module, grouped_linears.REWRITE, inference=False)
    assert not ran.changes


def test_the_operator_gives_eagers_numbers_everywhere():
    OPERATORS.load()
    arguments = example(3, 4, 4, 6, 5, 5)
    torch.testing.assert_close(torch.ops.fxopt.gpu_grouped(*arguments), reference(*arguments))
    assert torch.equal(gpu_grouped(*arguments), reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (256, 26, 325, 325, 16, 16), (2048, 13, 7, 78, 8, 24)])
def test_on_a_gpu(sizes):
    for turned in (False, True):
        arguments = example(*sizes, device="cuda", turned=turned)
        with torch.no_grad():
            given = gpu_grouped(*arguments).double()
        torch.testing.assert_close(given, exact(*arguments), rtol=1e-5, atol=1e-4)
