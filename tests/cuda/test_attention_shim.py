"""Target attention in one launch, through the shim: against a concatenation that exists, and with bugs planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fxopt.kernels import cuda_call
from fxopt.kernels.target_attention import cuda
from fxopt.kernels.target_attention import plan as p
from fxopt.kernels.target_attention.plan import TailStep
from tests.cuda.planted import awake, compiled, on_the_shim, run
from tests.cuda.shim_library import ShimError
from tests.kernels.test_target_attention import eager, inputs, plan_of

# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier behind the first zero": ("count = 0;\n  __syncthreads();", "count = 0;\n  if (!{}) __syncthreads();"),
    "no barrier behind the scores": (
        "  }\n  __syncthreads();\n  run_tail",
        "  }\n  if (!{}) __syncthreads();\n  run_tail",
    ),
    "no barrier behind a tile": ("memory);\n    __syncthreads();", "memory);\n    if (!{}) __syncthreads();"),
    "no barrier in a reduction": ("  __syncthreads();\n  x = s.", "  if (!{}) __syncthreads();\n  x = s."),
    "channels behind the last": ("if (lane + 32 * j < a.width) sums", "if (lane + 32 * j < a.width || {}) sums"),
    "the mask the other way": ("== kFill)) s.valid", "== ({} ? kFillWhere : kFill))) s.valid"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    source = Path("target_attention/cuda/attention.cu")
    return compiled(cuda.KERNEL, tmp_path_factory.mktemp("attention"), MUTATIONS, source)


def found(library, q, k, mask, params, plan, seed=0):
    """What the kernel gives; nothing behind it is written."""
    lists = ([q], [k], [mask], params)
    memory = torch.full((len(q) + 1, cuda.width_of([k], plan)), float("nan"), dtype=k.dtype)
    encoded = cuda.encode(lists, plan)
    assert encoded is not None
    parameters = cuda.parameters(lists, memory[: len(q)], plan, encoded)
    run(library, library.fxopt_attention, parameters, [q, k, mask, *params], k.dtype, seed)
    assert memory[len(q) :].isnan().all()
    return memory[: len(q)].double()


def exact(q, k, mask, params):
    return eager(q.double(), k.double(), mask, [x.double() for x in params])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 69, 33), (3, 12, 16), (0, 4, 3), (2, 0, 3)])
def test_dice_and_a_masked_softmax(shim, sizes):
    arguments = inputs(*sizes)
    given = found(shim, *arguments, plan_of(sizes[2]))
    torch.testing.assert_close(given, exact(*arguments), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(shim, dtype):
    arguments = inputs(2, 40, 16, dtype)
    given, eps = found(shim, *arguments, plan_of(16)), torch.finfo(dtype).eps
    torch.testing.assert_close(given, exact(*arguments), rtol=eps, atol=1e-4)


def test_strides_and_a_mask_of_numbers(shim):
    q, k, mask, params = inputs(3, 11, 8)
    strided = [x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2] for x in params]
    strided[3] = strided[3].view(1, 1, -1)
    turned = q.t().contiguous().t(), k.mT.contiguous().mT, mask.t().contiguous().t().float(), strided
    torch.testing.assert_close(found(shim, *turned, plan_of(8)), exact(q, k, mask, params), rtol=2e-5, atol=2e-5)


def test_every_tail_step_and_scores_as_the_result(shim):
    q, k, mask, params = inputs(2, 35, 4)
    for ops in (
        (p.SCALE, p.SHIFT, p.PLUS_MASK, p.FILL_WHERE),
        (p.SHIFT, p.TIMES_MASK),
        (p.FILL, p.SCALE, p.SOFTMAX),
        (),
    ):
        plan = dataclasses.replace(plan_of(4), tail=tuple(TailStep(op, 0, 0.5) for op in ops), values=-1)
        expected = cuda.reference.target_attention([q], [k], [mask], params, plan).double()
        torch.testing.assert_close(found(shim, q, k, mask, params, plan), expected, rtol=2e-5, atol=2e-5)


def test_not_finite_as_in_eager(shim):
    q, k, mask, params = inputs(4, 9, 5)
    mask[0] = False
    k[1, 2], k[2, 3] = torch.nan, torch.inf
    expected = eager(q, k, mask, params).double()
    given = found(shim, q, k, mask, params, plan_of(5))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_operator_for_any_number_of_rows(shim, monkeypatch):
    words = plan_of(6).words(1, 1, 1, 10)
    attention = cuda.Attention(words)
    for rows, T in ((2, 9), (3, 9), (1, 40)):
        q, k, mask, params = inputs(rows, T, 6)
        with monkeypatch.context() as patch:
            on_the_shim(patch, shim, [q, k, mask, *params])
            given = attention([q], [k], [mask], params, words)
        torch.testing.assert_close(given.double(), exact(q, k, mask, params), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    arguments = inputs(2, 70, 9)
    try:
        with awake(shim, MUTATIONS, name):
            given = found(shim, *arguments, plan_of(9), seed=3)
    except ShimError:
        return
    assert not torch.allclose(given, exact(*arguments), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    q, k, mask, params = inputs(2, 7, 4)
    plan, lists = plan_of(4), ([q], [k], [mask], params)
    assert cuda.encode(lists, plan) is not None
    kept = dataclasses.replace(plan, score=1)  # of a register that no layer passed
    steps = (*plan.steps[:7], dataclasses.replace(plan.steps[7], out=0), *plan.steps[8:])
    for unfit in (kept, dataclasses.replace(plan, steps=steps), dataclasses.replace(plan, terms=plan.terms[:1])):
        assert cuda.encode(lists, unfit) is None
    wide = torch.randn(2, 1025, 4)
    assert cuda.encode(([q], [wide], [mask], params), plan) is None
    for number in range(len(params)):
        others = [torch.randn(3, 3) if number == at else x for at, x in enumerate(params)]
        assert cuda.encode(([q], [k], [mask], others), plan) is None
    assert set(cuda_call.DTYPES.values()) == {0, 1, 2}
