"""Attention over short sequences by one kernel on CUDA: through the shim, and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fxopt.kernels.attention import plan as p
from fxopt.kernels.attention import reference
from fxopt.kernels.attention.cuda.heads import KERNEL, call_of, parameters, serves
from fxopt.kernels.attention.op import OPERATORS, views_of
from fxopt.kernels.attention.plan import Axis, Operand, Plan
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run, written_alone

SOURCES = "attention/cuda/heads.cu", "attention/cuda/tile.cuh"
# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "keys behind the last count": ("S::key(k) < live ? score", "S::key(k) < live || {} ? score"),
    "no zeros behind the last row": ("real = row < live &&", "real = (row < live || {}) &&"),
    "no zeros behind the last channel": ("&& channel < channels;", "&& (channel < channels || {});"),
    "no wait for the keys": ("if (values) cuda::wait_copies<1>();", "if (values && {}) cuda::wait_copies<2>();\n"
                             "      else if (values) cuda::wait_copies<1>();"),
    "no wait for the keys of weights": ("else cuda::wait_copies<0>();", "else if (!{}) cuda::wait_copies<0>();"),
    "no wait for the values": ("cuda::wait_copies<0>();\n    __syncwarp();\n    mixed.add",
                               "if (!{}) cuda::wait_copies<0>();\n    __syncwarp();\n    mixed.add"),
    "no barrier behind a tile": (
        "__syncwarp();  // nobody reads the last", "if (!{}) __syncwarp();  // nobody reads the last"
    ),
    "no barrier before the weights": (
        "score);\n      __syncwarp();\n      mask", "score);\n      if (!{}) __syncwarp();\n      mask"
    ),
    "sums are not scaled down": ("    sum[q] *= down;", "    if (!{}) sum[q] *= down;"),
    "values are not scaled down": ("values[q][c] *= down", "values[q][c] *= {} ? 1.0f : down"),
    "a part of the keys' sum": ("sum[q] += __shfl", "if (!{}) sum[q] += __shfl"),
    "a part of the keys' peak": ("highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, width));",
                                 "highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, {} ? 0 : width));"),
    "the keys of another head": ("key = begin_of(h, h.key, head)", "key = begin_of(h, h.key, {} ? 0 : head)"),
    "the mask of another query": ("begin + query *", "begin + ({} ? 0 : query) *"),
    "the mask of another key": ("(key + S::key(0)) * view", "({} ? 0 : key + S::key(0)) * view"),
    "scores that do not turn": ("score[S::kQueries - 1][k] = first;", "if (!{}) score[S::kQueries - 1][k] = first;"),
    "queries behind the last": ("if (query + S::query(q) >= h.queries)", "if (query + S::query(q) >= h.queries + {})"),
    "weights of another query": (
        "(head * h.queries + query) * h.keys", "(head * h.queries + ({} ? 0 : query)) * h.keys"
    ),
    "weights of the last tile": ("mixed.weigh(score, h.gated,", "if (!{}) mixed.weigh(score, h.gated,"),
    "weights that are not divided": ("S::key(k)] *= by", "S::key(k)] *= {} ? 1.0f : by"),
    "weights behind the last": ("k = S::lane(); k < live;", "k = S::lane(); k < live + {};"),
    "a share that is not scaled down": ("= fmaf(down, other.values", "= fmaf({} ? 1.0f : down, other.values"),
    "shares that do not wait": ("  __syncthreads();\n  mixed = ", "  if (!{}) __syncthreads();\n  mixed = "),
    "a bias of another head": ("h.bias, bias, real", "h.bias, {} ? 0 : bias, real"),
    "gates of nothing": ("h.gated ? -1e30f", "h.gated ? {} ? -INFINITY : -1e30f"),
    "gates that are not divided": ("sum[q] = divisor;", "sum[q] = {} ? 1.0f : divisor;"),
    "gates that are scaled down": ("peak[q] = 0;  // nothing", "if (!{}) peak[q] = 0;  // nothing"),
    "channels behind the last": ("if (channel + e < h.of_values)", "if (channel + e < h.of_values + {})"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("heads"), MUTATIONS, *SOURCES)


def example(
    B,
    H,
    L,
    S,
    D,
    masking=p.NO_MASK,
    of_values=None,
    fill=-math.inf,
    safe=False,
    device="cpu",
    weights=True,
    gated=False,
):
    """[B, L, H * D] and [B, S, H * D], the result as [B, L, H, D], and a mask [B, L, S] of which a row has no keys. A
    gate has a bias [H, L, S]."""
    E = of_values or D
    operands = [
        Operand((Axis(0, 1, -1), Axis(2, channels, H), Axis(1, 1, -1), Axis(2, 1, channels))) for channels in (D, D, E)
    ]
    mask = Operand((Axis(0, 1, -1), Axis(-1, 0, 1), Axis(1, 1, -1), Axis(2, 1, -1)))
    masked = masking not in (p.NO_MASK, p.CAUSAL)
    plan = Plan(*operands, mask if masked else None, masking, fill, 0.7, (0, 2, 1, 3), weights, safe)
    tensors = [torch.randn(B, size, H * channels, device=device) for size, channels in ((L, D), (S, D), (S, E))]
    unset = torch.rand(B, L, S, device=device) < 0.5
    unset[0, 0] = masking == p.FILL_SET
    added = torch.randn(B, L, S, device=device)
    masks = [added if masking == p.ADDED else unset] if masked else []
    if not gated:
        added[0, 0] = -torch.inf
        return plan, tensors, masks
    bias = Operand((Axis(-1, 0, 1), Axis(0, 1, H), Axis(1, 1, -1), Axis(2, 1, -1))) if masking else None
    plan = replace(plan, weighing=p.SILU, divisor=50.0, bias=bias)
    return plan, tensors, [*masks, *([torch.randn(H, L, S, device=device)] if masking else [])]


def exact(plan, tensors, mask):
    """The result and the weights."""
    views = views_of(*tensors, mask, plan)
    wide = [None if x is None else x if x.dtype == torch.bool else x.double() for x in views]
    result, weights = reference.attention(*wide, plan)
    return reference.laid_out(result, plan), weights


def found(library, plan, tensors, mask, seed=0):
    with written_alone(*(each.shape for each in exact(plan, tensors, mask))) as out:
        packed = parameters(views_of(*tensors, mask, plan), out[0], plan, out[1] if plan.weights else None)
        run(library, library.fxopt_heads, packed, [*tensors, *mask], torch.float32, seed)
    return tuple(each.double() for each in (out if plan.weights else out[:1]))


SIZES = [
    (2, 2, 26, 26, 8),  # AutoInt: five heads a block
    (1, 1, 1, 1, 1),
    (3, 1, 1, 50, 20),  # one query, and channels that no thread fills
    (1, 2, 130, 9, 16),  # two blocks a head
    (1, 1, 3, 203, 64),  # keys in three tiles
    (40, 3, 2, 5, 4),
]


@pytest.mark.parametrize(("B", "H", "L", "S", "D"), SIZES)
@pytest.mark.parametrize("masking", range(5))
def test_equals_fp64(shim, B, H, L, S, D, masking):
    for seed, fill in enumerate((-1e9, 0.25)):
        arguments = example(B, H, L, S, D, masking, fill=fill)
        torch.testing.assert_close(
            found(shim, *arguments, seed), exact(*arguments), rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize(("B", "H", "L", "S", "D"), SIZES)
@pytest.mark.parametrize("masking", range(5))
def test_gates_equal_fp64(shim, B, H, L, S, D, masking):
    for seed, fill in enumerate((-1e4, 0.25)):
        arguments = example(B, H, L, S, D, masking, fill=fill, gated=True)
        torch.testing.assert_close(found(shim, *arguments, seed), exact(*arguments), rtol=1e-5, atol=1e-5)


def test_of_many_queries_no_threads_share_the_keys(shim):
    arguments = example(16, 4, 130, 5, 33, p.ADDED)
    torch.testing.assert_close(found(shim, *arguments), exact(*arguments), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_weights(shim):
    arguments = example(2, 2, 7, 11, 8, weights=False)
    (given,) = found(shim, *arguments)
    torch.testing.assert_close(given, exact(*arguments)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_values", [3, 40])
def test_values_of_other_channels(shim, of_values):
    arguments = example(2, 2, 7, 11, 8, of_values=of_values)
    torch.testing.assert_close(found(shim, *arguments), exact(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("masking", [p.FILL_SET, p.FILL_UNSET, p.ADDED])
def test_a_query_without_keys(shim, masking, safe):
    arguments = example(2, 2, 5, 7, 8, masking, safe=safe)
    given = found(shim, *arguments)
    torch.testing.assert_close(given, exact(*arguments), rtol=1e-5, atol=1e-5, equal_nan=True)
    without = given[0][0, 0], given[1][0, :, 0]
    assert all((each == 0).all() if safe else each.isnan().all() for each in without)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", range(3))
def test_numbers_that_are_not_finite(shim, value, operand):
    arguments = example(2, 1, 5, 9, 8)
    arguments[1][operand][0, 3, 2] = value
    torch.testing.assert_close(found(shim, *arguments), exact(*arguments), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_scores_that_grow(shim):
    plan, tensors, mask = example(1, 1, 4, 40, 8)
    tensors[1] *= torch.arange(1.0, 41)[:, None]
    torch.testing.assert_close(found(shim, plan, tensors, mask), exact(plan, tensors, mask), rtol=1e-5, atol=1e-5)


def test_the_operator_on_the_shim(shim, monkeypatch):
    OPERATORS.load()
    plan, tensors, mask = example(2, 2, 5, 7, 8, p.ADDED)
    on_the_shim(monkeypatch, shim, [*tensors, *mask])
    for given in (tensors, [x[:0] for x in tensors]):
        masks = [x[: len(given[0])] for x in mask]
        results = tuple(each.double() for each in call_of(plan)(*given, masks, plan.words()))
        torch.testing.assert_close(results, exact(plan, given, masks), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_the_kernel_the_operator_computes_it():
    OPERATORS.load()
    plan, tensors, mask = example(2, 2, 5, 7, 8, p.FILL_UNSET)
    results = tuple(each.double() for each in call_of(plan)(*tensors, mask, plan.words()))
    torch.testing.assert_close(results, exact(plan, tensors, mask), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_it_serves():
    plan, _, _ = example(2, 2, 5, 7, 8, p.ADDED)
    floats = [torch.float32] * 4
    assert serves(plan, floats, [8, 64])
    assert not serves(plan, floats, [8, 65]) and not serves(plan, [*floats[:3], torch.bool], [8, 8])
    assert not serves(plan, [torch.bfloat16, *floats[1:]], [8, 8])


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    calls = [example(2, 3, 26, 26, 8, p.ADDED), example(1, 1, 130, 203, 30), example(2, 2, 5, 9, 8)]
    calls[0][2][0].nan_to_num_(0)
    calls += [example(2, 2, 5, 9, 8, p.FILL_SET, fill=-1e4, gated=True), example(1, 1, 3, 203, 64, gated=True)]

    def agrees(*arguments):
        pairs = zip(found(shim, *arguments), exact(*arguments), strict=True)
        return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)

    assert any(is_noticed(shim, MUTATIONS, name, partial(agrees, *arguments)) for arguments in calls)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "H", "L", "S", "D"), [*SIZES, (512, 2, 26, 26, 8), (100, 4, 200, 200, 16)])
@pytest.mark.parametrize("masking", range(5))
@pytest.mark.parametrize("gated", [False, True])
def test_on_a_gpu(B, H, L, S, D, masking, gated):
    OPERATORS.load()
    plan, tensors, mask = example(B, H, L, S, D, masking, fill=-1e9, device="cuda", gated=gated)
    with torch.no_grad():
        given = tuple(each.double() for each in call_of(plan)(*tensors, mask, plan.words()))
    torch.testing.assert_close(given, exact(plan, tensors, mask), rtol=1e-4, atol=1e-4, equal_nan=True)
