"""Chains of narrow layers in one launch, through the shim: against fp64, and with bugs planted."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels import cuda_build, cuda_call
from fxopt.kernels.mlp import reference
from fxopt.kernels.mlp.cuda import chains as cuda
from fxopt.kernels.mlp.plan import Op, Step, encode, joined
from fxopt.kernels.mlp.serves import MOST_CHAINS
from tests.cuda.planted import is_noticed, on_the_shim, planted, run
from tests.cuda.shim_library import ShimError, compile_shim
from tests.kernels.test_mlp import chain

CHAINS, TILE = "mlp/cuda/chains.cu", "mlp/cuda/tile.cuh"
# What is wrong, in which file, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier behind the copies": (
        CHAINS,
        "    __syncthreads();\n    if (!first)",
        "    if (!{}) __syncthreads();\n    if (!first)",
    ),
    "the first piece before it is there": (
        CHAINS,
        "(first) cuda::wait_copies<1>()",
        "(first) {} ? cuda::wait_copies<2>() : cuda::wait_copies<1>()",
    ),
    "a piece before it is there": (
        CHAINS,
        "else cuda::wait_copies<0>()",
        "else {} ? cuda::wait_copies<1>() : cuda::wait_copies<0>()",
    ),
    "no barrier behind the products": (
        CHAINS,
        "    __syncthreads();  // before",
        "    if (!{}) __syncthreads();  // before",
    ),
    "no barrier behind the sums": (
        CHAINS,
        "    __syncthreads();\n    int end",
        "    if (!{}) __syncthreads();\n    int end",
    ),
    "a slice left out": (CHAINS, "s < slices;", "s < slices - {};"),
    "columns behind the last": (CHAINS, ">= (N + 3) / 4 * 4)", ">= ({} ? N : (N + 3) / 4 * 4))"),
    "rows behind the last": (CHAINS, "row + r < rows)", "(row + r < rows || {}))"),
    "inputs behind the last": (TILE, "k < ks ? __ldg", "(k < ks || {}) ? __ldg"),
    "copies that are not aligned": (TILE, "&& down % kVector == 0", "&& (down % kVector == 0 || {})"),
    "rows in another order": (CHAINS, "kSumPitch + row_of(lane))", "kSumPitch + (row_of(lane) ^ ({} ? 4 : 0)))"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    return cuda_build.declared(cuda.KERNEL, compile_shim(folder, planted(cuda.KERNEL, folder, MUTATIONS), "-O1"))


def found(library, x, state, steps, seed=0, copies=1):
    """What the kernel gives; nothing behind it is written."""
    N = cuda.width_of(state, steps)
    memory = [torch.full((x.shape[0] + 33, N), 77.0, dtype=x.dtype) for _ in range(copies)]
    outs = [out[: x.shape[0]] for out in memory]
    encoded = cuda.encode(steps, x.shape[1], [t.shape for t in state])
    assert encoded is not None
    parameters = cuda.parameters([x] * copies, outs, [state] * copies, [encoded] * copies)
    run(library, library.fxopt_mlp, parameters, [x, *state], x.dtype, seed)
    if any((out[x.shape[0] :] != 77).any() for out in memory):
        raise ShimError("a write outside the output")
    return outs[-1].double()


def example(step, sizes, dtype=torch.float32):
    """Layers of these sizes, the step behind each."""
    state, steps = chain(step, sizes)
    first = next(k for k, each in enumerate(steps) if each.op == Op.LINEAR)
    return [t.to(dtype) for t in state], steps[first:]


def exact(x, state, steps):
    return reference.mlp([x.double()], [t.double() for t in state], steps)


@pytest.mark.parametrize("step", [op for op in Op if op not in (Op.LINEAR, Op.LAYER_NORM)])
def test_every_step(shim, step):
    state, steps = example(step, (13, 5, 1))
    x = torch.randn(3, 26)[:, ::2]
    torch.testing.assert_close(found(shim, x, state, steps), exact(x, state, steps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cuda_call.DTYPES)
@pytest.mark.parametrize(
    ("rows", "sizes"), [(33, (40, 128, 17, 1)), (1, (1, 65)), (64, (150, 3, 128)), (17, (304, 72, 128, 100, 8))]
)
def test_sizes(shim, dtype, rows, sizes):
    state, steps = example(Op.RELU, sizes, dtype)
    state[1 if len(state) > 2 else 0] = state[1 if len(state) > 2 else 0].t().contiguous().t()
    x = torch.randn(rows, sizes[0]).to(dtype)
    rtol = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(found(shim, x, state, steps), exact(x, state, steps), rtol=rtol, atol=1e-5)


def test_many_chains(shim):
    state, steps = example(Op.SIGMOID, (7, 30, 2))
    x = torch.randn(40, 7)
    for copies in (2, MOST_CHAINS):
        given = found(shim, x, state, steps, copies=copies)
        torch.testing.assert_close(given, exact(x, state, steps), rtol=1e-5, atol=1e-5)


def test_the_operator_for_any_number_of_rows(shim, monkeypatch):
    layers = [example(Op.RELU, (5, 9, 2)), example(Op.TANH, (6, 4))]
    plan = joined([(len(state), encode(1, steps)) for state, steps in layers])
    state = [tensor for own, _ in layers for tensor in own]
    chains = cuda.Chains(plan)
    for rows in (3, 40, 0):
        inputs = [torch.randn(rows, 5), torch.randn(rows, 6)]
        with monkeypatch.context() as patch:
            on_the_shim(patch, shim, [*inputs, *state])
            given = chains(inputs, state, plan)
        for y, x, (own, steps) in zip(given, inputs, layers, strict=True):
            assert y.shape == (rows, cuda.width_of(own, steps))
            torch.testing.assert_close(y.double(), exact(x, own, steps), rtol=1e-5, atol=1e-5)
    patched = torch.randn(4, 5), torch.randn(3, 6)  # other numbers of rows: layer by layer
    on_the_shim(monkeypatch, None, [])
    assert [len(y) for y in chains(patched, state, plan)] == [4, 3]


def test_nan_and_infinities_are_torchs(shim):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 1e-40, 90.0, -90.0])
    for op in (Op.RELU, Op.SIGMOID, Op.TANH, Op.SILU, Op.ELU, Op.SOFTPLUS, Op.CLAMP):
        steps = [Step(Op.LINEAR, (0, None)), Step(op, (), (0.25, 0.75))]
        given = found(shim, values.unsqueeze(1), [torch.ones(1, 1)], steps)
        expected = reference.apply(values.unsqueeze(1), [], steps[1]).double()
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    assert is_noticed(
        shim, MUTATIONS, name, lambda: all(same for seed in range(3) for same in _planted_cases(shim, seed))
    )


def _planted_cases(shim, seed):
    """Whether all is right: odd sizes, sizes copied 16 bytes at a time, rows that do not start at 16 bytes."""
    for sizes, width in (((21, 70, 19), 21), ((136, 128, 8), 136), ((24, 9), 25)):
        state, steps = example(Op.RELU, sizes)
        x = torch.randn(34, width)[:, : sizes[0]]
        x[0, 0], state[0][:, 0] = torch.inf, -1  # the ReLU leaves zeros, and nothing may make NaN of them
        given = found(shim, x, state, steps, seed=seed)
        yield torch.allclose(given, exact(x, state, steps), rtol=1e-4, atol=1e-4)


def test_without_a_bug_these_are_right(shim):
    assert all(_planted_cases(shim, 0))


def test_what_does_not_fit_is_refused():
    for sizes in ((4, 129, 1), (4, 5)):
        state, steps = example(Op.LAYER_NORM if len(sizes) == 2 else Op.RELU, sizes)
        assert cuda.encode(steps, 4, [t.shape for t in state]) is None
    state, steps = example(Op.RELU, (4, 5, 3))
    shapes = [t.shape for t in state]
    assert cuda.encode(steps, 5, shapes) is None
    for k in range(len(shapes)):
        others = [torch.Size([7]) if j == k else shape for j, shape in enumerate(shapes)]
        assert cuda.encode(steps, 4, others) is None
