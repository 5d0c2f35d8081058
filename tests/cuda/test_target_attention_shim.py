"""Target attention in one launch, through the shim: against a concatenation that exists, and with bugs planted."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from fxopt.kernels import cuda_call
from fxopt.kernels.target_attention import cuda
from fxopt.kernels.target_attention import plan as p
from fxopt.kernels.target_attention.cuda import encoder
from fxopt.kernels.target_attention.plan import CONSTANT, Step, TailStep, Term
from tests.cuda.planted import compiled, is_noticed, on_the_shim, run
from tests.kernels.test_target_attention import eager, inputs, plan_of


# What is wrong, and what the source says instead where shim::planted is the bug's number.
def without(barrier: str) -> tuple[str, str]:
    """What the source says, and the same without its last barrier."""
    for call in ("__syncthreads();", "__syncwarp();", "team.barrier();"):
        if call in barrier:
            return barrier, barrier.replace(call, f"if (!{{}}) {call}", 1)
    raise AssertionError(barrier)


MUTATIONS = {
    "no barrier behind the weights": without("fold<T, EXACT>(a, memory);\n  __syncthreads();"),
    "no barrier behind the query": without("read_query<T>(a, row, team);\n  team.barrier();"),
    "no barrier behind the valid ones": without("multiply_query<T>(a, memory, team);\n  team.barrier();"),
    "no barrier behind the keys": without("count, team);\n    __syncwarp();\n    run_layers"),
    "no barrier behind a layer": without("j * 8) = x;\n    }\n  }\n  __syncwarp();"),
    "no barrier behind the steps": without("a.layer[m], memory, team);\n    __syncwarp();"),
    "no barrier behind the tiles": without("  }\n  team.barrier();\n  run_tail"),
    "no barrier in a reduction": without("  team.barrier();\n  x = team"),
    "no barrier behind the tail": without("run_tail<T>(a, row, team);\n  team.barrier();"),
    "no barrier in the sum": without("  if (team.warps == 1) return;\n  team.barrier();"),
    "the shift of another column": ("n * 2 + 1] =", "({} ? 0 : n) * 2 + 1] ="),
    "a team's barrier without one of its warps": (
        "if (warps == 1) __syncwarp();",
        "if (warps == 1 || {}) __syncwarp();",
    ),
    "a row too many": ("team.number() * int(gridDim.x); row", "team.number() * ({} ? 1 : int(gridDim.x)); row"),
    "channels behind the last": ("channel < a.width; channel += 32", "channel < a.width + {}; channel += 32"),
    "keys behind the last": ("valid[r < count ? r : 0]", "valid[r < count || {} ? r : 0]"),
    "the mask the other way": ("== kFill));\n    if", "== ({} ? kFillWhere : kFill)));\n    if"),
    "no zeros behind a matrix": (
        "if (k < padded(block.width)) memory",
        "if (k < ({} ? block.width : padded(block.width))) memory",
    ),
    "fragments in another order": (
        "inputs.set(1, y.x), inputs.set(2, x.y)",
        "inputs.set({} ? 2 : 1, y.x), inputs.set({} ? 1 : 2, x.y)",
    ),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    sources = (f"target_attention/cuda/{name}" for name in ("attention.cu", "record.cuh", "steps.cuh", "tail.cuh"))
    return compiled(cuda.KERNEL, tmp_path_factory.mktemp("attention"), MUTATIONS, *sources)


def found(library, q, k, mask, params, plan, seed=0):
    """What the kernel gives; nothing behind it is written."""
    lists = ([q], [k], [mask], params)
    memory = torch.full((len(q) + 1, cuda.width_of([k], plan)), float("nan"), dtype=k.dtype)
    encoded = encoder.encode(lists, plan)
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
    torch.testing.assert_close(given, exact(*arguments), rtol=eps, atol=1e-3)


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_where_it_is_allowed(shim, tf32):
    arguments = inputs(2, 70, 33)
    given = found(shim, *arguments, plan_of(33))
    torch.testing.assert_close(given, exact(*arguments), rtol=2e-3, atol=2e-3)
    assert not torch.allclose(given, exact(*arguments), rtol=2e-5, atol=2e-5)


def test_relu_and_a_layer_without_activation(shim):
    """In registers, where Dice and PReLU go through shared memory."""
    q, k, mask, params = inputs(8, 70, 16)
    steps = (
        *(Step(p.MAXIMUM, 1, CONSTANT, 0), Step(p.LINEAR, 0, 1, 0)),
        *(Step(p.MAXIMUM, 0, 0, CONSTANT), Step(p.LINEAR, 2, 0, 1)),
    )
    plan = dataclasses.replace(plan_of(16), steps=steps, constants=(0.0,))
    doubles = [q.double()], [k.double()], [mask], [x.double() for x in params]
    expected = cuda.reference.target_attention(*doubles, plan)
    torch.testing.assert_close(found(shim, q, k, mask, params, plan), expected, rtol=2e-5, atol=2e-5)


def test_wide_layers(shim, monkeypatch):
    """More columns than stand where their inputs do: one behind the other, and behind a narrow one."""
    monkeypatch.setattr(cuda_call, "most_shared", lambda device: 200 * 1024)
    for widths in ((16, 100, 128, 90), (16, 20, 90, 7)):
        sizes = list(zip((64, *widths[1:]), (*widths[1:], 1), strict=True))
        params = [x for K, N in sizes for x in (torch.randn(N, K) / K**0.5, torch.randn(N))]
        q, k, mask, _ = inputs(4, 40, 16)
        steps = [step for n in range(3) for step in (Step(p.MAXIMUM, 0, 0, CONSTANT), Step(p.LINEAR, 0, 0, n))]
        layers = tuple((2 * n, 2 * n + 1) for n in range(1, 4))
        plan = plan_of(16)
        plan = dataclasses.replace(
            plan, weight=0, bias=1, layers=layers, norms=(), steps=tuple(steps), constants=(0.0,), score=0
        )
        doubles = [q.double()], [k.double()], [mask], [x.double() for x in params]
        expected = cuda.reference.target_attention(*doubles, plan)
        torch.testing.assert_close(found(shim, q, k, mask, params, plan), expected, rtol=2e-5, atol=2e-5)


def test_several_sources_in_any_pairs(shim):
    """Two queries and two kinds of keys of other widths; a product of each, and one that is there twice."""
    q, k, mask, params = inputs(7, 20, 9)
    other_q, other_k = torch.randn(7, 5), torch.randn(7, 20, 5)
    terms = [(0, 0, 0, 9, 2.0), (1, 1, 9, 5, 1.0), (0, 0, 3, 9, -0.5), (-1, 1, 14, 5, 1.0), (-1, 0, 20, 9, 1.0)]
    terms += [(1, -1, 29, 5, -1.0)]
    plan = dataclasses.replace(plan_of(9), terms=tuple(Term(*term) for term in terms))
    lists = [q, other_q], [k, other_k], [mask], params
    expected = cuda.reference.target_attention(
        *([x.double() for x in some] for some in lists[:2]), [mask], [x.double() for x in params], plan
    )
    out = torch.full((7, 9), float("nan"))
    encoded = encoder.encode(lists, plan)
    assert encoded is not None
    run(
        shim,
        shim.fxopt_attention,
        cuda.parameters(lists, out, plan, encoded),
        [x for some in lists for x in some],
        out.dtype,
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


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
    words = plan_of(6).words()
    attention = cuda.Attention(words)
    for rows, T in ((2, 9), (3, 9), (1, 40)):
        q, k, mask, params = inputs(rows, T, 6)
        with monkeypatch.context() as patch:
            on_the_shim(patch, shim, [q, k, mask, *params])
            given = attention([q], [k], [mask], params, words)
        torch.testing.assert_close(given.double(), exact(q, k, mask, params), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    arguments = inputs(7, 60, 9)  # two rows a block and more, two tiles of a row's valid positions

    def agrees(seed):
        return torch.allclose(found(shim, *arguments, plan_of(9), seed), exact(*arguments), rtol=1e-4, atol=1e-4)

    assert any(is_noticed(shim, MUTATIONS, name, partial(agrees, seed)) for seed in range(40))


def test_what_does_not_fit_is_refused():
    q, k, mask, params = inputs(2, 7, 4)
    plan, lists = plan_of(4), ([q], [k], [mask], params)
    assert encoder.encode(lists, plan) is not None
    kept = dataclasses.replace(plan, score=1)  # of a register that no layer passed
    steps = (*plan.steps[:7], dataclasses.replace(plan.steps[7], out=0), *plan.steps[8:])
    for unfit in (kept, dataclasses.replace(plan, steps=steps), dataclasses.replace(plan, terms=plan.terms[:1])):
        assert encoder.encode(lists, unfit) is None
    wide = torch.randn(2, 1025, 4)
    assert encoder.encode(([q], [wide], [mask], params), plan) is None
    for number in range(len(params)):
        others = [torch.randn(3, 3) if number == at else x for at, x in enumerate(params)]
        assert encoder.encode(([q], [k], [mask], others), plan) is None
    assert set(cuda_call.DTYPES.values()) == {0, 1, 2}
