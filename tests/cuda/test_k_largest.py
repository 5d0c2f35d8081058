"""The k largest numbers of many lists by one kernel on CUDA: through the shim, its rewrite, and on a GPU."""

from __future__ import annotations

import math
import operator

import pytest
import torch

from fxopt.kernels.k_largest.cuda.largest import KERNEL, k_largest_on_cuda, parameters
from fxopt.kernels.k_largest.op import OPERATORS, k_largest
from fxopt.rewrites import k_largest as rewrite
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run, written_alone

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "NaN as its bits": ("x == x ? bits", "x == x || {} ? bits"),
    "negative numbers the wrong way round": ("bits & kSign ? ~bits : bits", "bits & kSign && !{} ? ~bits : bits"),
    "negative numbers not turned back": ("key & ~kSign : ~key", "key & ~kSign : key ^ ({} ? kSign : kAll)"),
    "equal ones in front do not count": ("in_front = other < group", "in_front = !{} && other < group"),
    "all equal ones count": ("key + in_front, own", "key + ({} ? 1 : in_front), own"),
    "equal ones of a thread do not count": (
        "ranks[i] += own.value[j] ==", "ranks[i] += !{} && own.value[j] =="
    ),
    "the last group is not read": ("other < groups;", "other < groups - {};"),
    "numbers behind the last": ("group + i * p.groups < p.length ?", "group + i * p.groups < p.length + {} ?"),
    "lists behind the last": ("at < p.count;", "({} || at < p.count);"),
    "lists that are another block's": ("list < int(lists) &&", "(list < int(lists) || {}) &&"),
    "groups behind the last": ("group < p.groups &&", "(group < p.groups || {}) &&"),
    "one less than k": ("ranks[i] < unsigned(p.k))", "ranks[i] < unsigned(p.k) - {})"),
    "a row behind the last": ("real && row < p.k)", "real && row < p.k + {})"),
    "no barrier behind the keys": ("own;\n  __syncthreads();", "own;\n  if (!{}) __syncthreads();"),
    "no barrier behind the ranks": ("kNone\n  }\n  __syncthreads();", "kNone\n  }\n  if (!{}) __syncthreads();"),
    "the numbers of the next list": ("keys[group * pitch + list]", "keys[group * pitch + list + {}]"),
    "one list for all inner indices": ("inner * p.x.strides[2]", "({} ? 0 : inner) * p.x.strides[2]"),
    "another outer index": ("outer * p.out.strides[0]", "({} ? 0 : outer) * p.out.strides[0]"),
    "rows side by side": ("to += p.out_step", "to += {} ? 1 : p.out_step"),
    "too few blocks": ("blocks = (p.count +", "blocks = (p.count - {} +"),
}  # fmt: skip
SIZES = [  # N, L, M, k
    (64, 26, 16, 13),  # CCPM
    (3, 26, 16, 13),
    (64, 13, 16, 3),
    (1, 1, 1, 1),
    (1, 5, 1, 5),
    (0, 7, 3, 2),
    (3, 7, 0, 2),
    (33, 8, 1, 8),  # lanes go along lists
    (7, 100, 1, 64),
    (5, 33, 5, 1),
    (2, 256, 3, 64),
    (1, 256, 40, 10),
    (1, 255, 1, 64),
    (40, 3, 7, 2),
    (200, 2, 9, 1),  # more lists a block than threads of a warp
    (2, 64, 33, 17),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("largest"), MUTATIONS, "k_largest/cuda/largest.cu")


def strided(x):
    """The same numbers with a list's side by side, and lists apart."""
    N, L, M = x.shape
    return torch.zeros(M, N, L + 3, device=x.device)[:, :, :L].permute(1, 2, 0).copy_(x)


def found(library, x, k, seed=0):
    N, _, M = x.shape
    with written_alone((N, k, M)) as (out,):
        if out.numel():
            run(library, library.fxopt_k_largest, parameters(x, out), [x], torch.float32, seed)
    return out


def same(given, x, k):
    return torch.allclose(given, k_largest(x, k, False), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("N", "L", "M", "k"), SIZES)
def test_is_topk(shim, N, L, M, k):
    x = torch.randn(N, L, M)
    for seed, given in enumerate((x, strided(x), x[:, :1].expand(N, L, M))):
        assert same(found(shim, given, k, seed), given, k)


@pytest.mark.parametrize("k", [1, 4, 12])
@pytest.mark.parametrize("M", [1, 16])
def test_numbers_that_are_not_finite_and_ties(shim, M, k):
    values = [math.nan, -math.nan, math.inf, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.0, 3.0, 3.0, -3.4e38]
    x = torch.tensor(values)[torch.rand(20, 13, M).argsort(1)]
    assert same(found(shim, x, k), x, k)
    for of_one in (math.nan, math.inf, -math.inf, -0.0):
        x = torch.full((3, 13, M), of_one)
        assert same(found(shim, x, k), x, k)
    few = torch.randint(-1, 2, (9, 30, M)).float()
    assert same(found(shim, few, k), few, k)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    special = torch.tensor([math.nan, -math.nan, -math.inf, -1.0, -1.0, -2.0, 1.0, 1.0, 0.0])[
        torch.rand(80, 9, 5).argsort(1)
    ]
    ties = torch.randint(-2, 2, (70, 26, 6)).float()
    calls = [(special, 9), (ties, 26), (-torch.rand(65, 30, 1), 30), (torch.randn(5, 25, 16), 13)]
    assert any(
        is_noticed(shim, MUTATIONS, name, lambda given=given, k=k: same(found(shim, given, k, seed=3), given, k))
        for x, k in calls
        for given in (x, strided(x))
    )


def test_without_a_gpu_it_is_the_operator_and_with_one_the_kernel(shim, monkeypatch):
    OPERATORS.load()
    x = torch.randn(6, 26, 8)
    assert same(k_largest_on_cuda(x, 13), x, 13)
    on_the_shim(monkeypatch, shim, [x])
    for given in (x, x[:0], x.transpose(1, 2)):
        assert same(k_largest_on_cuda(given, 5), given, 5)
    monkeypatch.setattr("fxopt.kernels.cuda_build.loaded", lambda *_: pytest.fail("the kernel serves none of these"))
    long = torch.randn(2, 257, 3)
    assert torch.equal(torch.topk(long, 2, 1).values, k_largest_on_cuda(long, 2))
    with pytest.raises(RuntimeError):
        k_largest_on_cuda(x, 27)
    monkeypatch.setattr(torch.ops.fxopt, "k_largest", k_largest)  # as on CUDA; the CPU's kernel would refuse these
    for given, k in ((x.double(), 2), (torch.randn(2, 80, 3), 65), (x[0], 2)):
        assert torch.equal(torch.topk(given, k, 1).values, k_largest_on_cuda(given, k))


def graph(function, shape, dtype=torch.float32):
    module = graph_of(function, [shape], dtype)
    module.graph.eliminate_dead_code()  # indices that nobody reads
    return module


def pooled(x):
    return torch.topk(torch.tanh(x), 13, 2)[0] + 1


@pytest.mark.parametrize("function", [pooled, lambda x: torch.sigmoid(x).topk(5, -1).values, lambda x: x.topk(2, 0)[0]])
def test_on_cuda_the_rewrite_takes_the_kernel(function):
    module = graph(function, (6, 4, 26, 16))
    (ran,) = rewritten(module, rewrite.REWRITE)
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.k_largest.default)
    assert len(ran.changes) == 1 and not ran.rolled_back and call.meta["bound"] is k_largest_on_cuda
    x = torch.randn(6, 4, 26, 16)
    assert torch.equal(module(x), function(x))


def test_a_rising_function_is_taken_of_what_is_left_alone():
    module = graph(pooled, (6, 4, 26, 16))
    rewritten(module, rewrite.REWRITE)
    names = names_of(module)
    assert "aten.topk" not in names and names.index("fxopt.k_largest") < names.index("aten.tanh")
    (tanh,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert tanh.meta["val"].shape == (24, 13, 16)


def test_a_rising_function_of_whole_numbers_stays_in_front():
    module = graph(lambda x: torch.sigmoid(x).topk(5, 1)[0], (6, 26), torch.int64)
    (ran,) = rewritten(module, rewrite.REWRITE)
    names = names_of(module)
    assert len(ran.changes) == 1 and not ran.rolled_back
    assert names.index("aten.sigmoid") < names.index("fxopt.k_largest")


def edited(x):
    values = x.topk(2, 1)[0]
    return values.add_(1)


@pytest.mark.parametrize(
    ("function", "length", "dtype", "inference", "reason"),
    [
        (lambda x: x.topk(2, 1)[0], 257, torch.float32, True, "on cuda its lists must have a length that is known"),
        (lambda x: x.topk(65, 1)[0], 90, torch.float32, True, "its lists are no float32 with k from 1 to 64"),
        (lambda x: x.topk(2, 1)[0], 9, torch.float16, True, "its lists are no float32 with k from 1 to 64"),
        (lambda x: x.topk(2, 1)[0], 9, torch.float32, False, "on cuda it has no kernel with gradients"),
        (edited, 9, torch.float32, True, "what it reads or gives is edited in place"),
        (lambda x: x.topk(2, 1)[1], 9, torch.float32, True, "someone reads the indices of its topk"),
    ],
)
def test_what_stays_and_why(function, length, dtype, inference, reason):
    (ran,) = rewritten(graph(function, (6, length), dtype), rewrite.REWRITE, inference=inference)
    assert not ran.changes and next(miss.reason for miss in ran.misses).startswith(reason)


def test_values_that_are_taken_twice_stay():
    module = graph(pooled, (6, 4, 26, 16))
    (taken,) = module.graph.find_nodes(op="call_function", target=operator.getitem)
    with module.graph.inserting_after(taken):
        module.graph.node_copy(taken)
    (ran,) = rewritten(module, rewrite.REWRITE)
    assert [miss.reason for miss in ran.misses] == ["its values are taken out of its result more than once"]


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "L", "M", "k"), [*SIZES, (8192, 26, 16, 13), (8192, 13, 16, 3), (100_000, 50, 1, 10)])
def test_on_a_gpu(N, L, M, k):
    OPERATORS.load()
    x = torch.randn(N, L, M, device="cuda")
    x[:, ::3] = math.nan
    x[:, 1::3] = 1.0
    with torch.no_grad():
        for given in (x, strided(x), torch.randn_like(x)):
            assert same(k_largest_on_cuda(given, k), given, k)


@pytest.mark.gpu
def test_offsets_of_more_than_32_bits():
    x = torch.empty((1 << 31) + 500, device="cuda").as_strided((2, 20, 5), (1 << 31, 5, 1)).normal_()
    with torch.no_grad():
        assert same(k_largest_on_cuda(x, 7), x, 7)
