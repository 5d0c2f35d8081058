"""fxopt::mlp by itself: every step on every instruction set, threads, opcheck, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.kernels.mlp import gradient, op, reference
from fxopt.kernels.mlp.plan import Op, Step, decode, encode

op.OPERATORS.load()
needs_kernel = pytest.mark.skipif(not op.OPERATORS.compiled(), reason="no C++ compiler")
_VECTORS = {Op.BATCH_NORM: 4, Op.DICE: 5, Op.LAYER_NORM: 2, Op.PRELU: 1}


def chain(step: Op, sizes: tuple[int, ...]) -> tuple[list[Tensor], list[Step]]:
    """Linear layers of these sizes, the step before the first one and behind each."""
    state, steps = list[Tensor](), list[Step]()

    def add(op: Op, *tensors: Tensor) -> None:
        at = range(len(state), len(state) + len(tensors))
        state.extend(tensors)
        steps.append(Step(op, tuple(at), () if op == Op.LINEAR else (0.25, 0.75)))

    def behind(width: int) -> None:
        add(step, *(torch.rand(width) + 0.1 for _ in range(_VECTORS.get(step, 0))))

    behind(sizes[0])
    for K, N in itertools.pairwise(sizes):
        add(Op.LINEAR, torch.randn(N, K) / K**0.5, torch.randn(N))
        behind(N)
    return state, steps


@needs_kernel
@pytest.mark.parametrize("step", list(Op)[1:])
@pytest.mark.usefixtures("isa")
def test_no_further_from_fp64_than_torch(step: Op) -> None:
    state, steps = chain(step, (13, 37, 64, 3))
    plan = encode(2, steps)
    for rows in (0, 1, 5, 77):
        inputs = [torch.randn(rows, 6), torch.randn(7, rows).t()]
        found, torchs = op.call_of(plan)(inputs, state, plan), reference.mlp(inputs, state, steps)
        exact = reference.mlp([x.double() for x in inputs], [tensor.double() for tensor in state], steps)
        assert found.shape == torchs.shape
        if rows:
            rounding = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
            assert (found - exact).abs().max() <= 2 * (torchs - exact).abs().max() + rounding


@needs_kernel
@pytest.mark.parametrize("step", [Op.RELU, Op.SIGMOID, Op.TANH, Op.SILU, Op.ELU, Op.SOFTPLUS, Op.CLAMP])
def test_nan_and_infinities_are_torchs(step: Op) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 1e-40, 90.0, -90.0])
    steps = [Step(Op.LINEAR, (0, None)), Step(step, (), (0.25, 0.75))]
    x = values.unsqueeze(1)
    found = op.call_of(encode(1, steps))([x], [torch.ones(1, 1)], encode(1, steps))
    torch.testing.assert_close(found, reference.apply(x, [], steps[1]), equal_nan=True)


@needs_kernel
@pytest.mark.usefixtures("isa")
def test_weights_that_lie_the_other_way() -> None:
    steps = [Step(Op.LINEAR, (0, 1)), Step(Op.LINEAR, (2, None))]
    plan = encode(1, steps)
    for K, H, N in ((200, 83, 70), (1, 3, 1), (17, 1, 64)):
        state = [torch.randn(K, H).t() / K**0.5, torch.randn(H), torch.randn(H, N).t() / H**0.5]
        for rows in (1, 2, 9, 50):
            x = torch.randn(rows, K)
            torch.testing.assert_close(op.call_of(plan)([x], state, plan), reference.mlp([x], state, steps))


@needs_kernel
@pytest.mark.parametrize("step", [None, *gradient.FROM_RESULT])
@pytest.mark.usefixtures("isa")
def test_what_a_layers_gradients_are_made_of(step: Op | None) -> None:
    for M, N in ((0, 3), (1, 1), (5, 40), (300, 17), (131, 128)):
        grads = torch.randn(M, N), torch.randn(N, M).t(), torch.randn(M, 2 * N)[:, :N], torch.randn(M, 1).expand(M, N)
        values = torch.randn(M, N).masked_fill_(torch.rand(M, N) < 0.2, 0.0)
        values[torch.rand(M, N) < 0.02] = float("nan")
        for grad, y in itertools.product(grads, (values, values.t().contiguous().t())):
            found, turned, sums = gradient.call(grad, None if step is None else y, step or Op.LINEAR)
            asked = grad if step is None else gradient.FROM_RESULT[step](grad, y)
            torch.testing.assert_close(found, asked, equal_nan=True)
            torch.testing.assert_close(turned, found.t(), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(sums, found.double().sum(0).float(), equal_nan=True)


@needs_kernel
def test_threads_share_rows_or_columns() -> None:
    state, steps = chain(Op.RELU, (300, 512, 257))
    plan, threads = encode(1, steps), torch.get_num_threads()
    for rows in (1, 3, 60, 500):
        x = torch.randn(rows, 300)
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(op.call_of(plan)([x], state, plan))
        torch.set_num_threads(threads)
        torch.testing.assert_close(results[1:], [results[0]] * 2)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op.OPERATORS, "compiled", lambda: False)
    state, steps = chain(Op.GELU, (200, 150, 2))
    plan, x = encode(1, steps), torch.randn(90, 200)
    with torch.no_grad():
        torch.testing.assert_close(op.call_of(plan)([x], state, plan), reference.mlp([x], state, steps))


def test_opcheck() -> None:
    state, steps = chain(Op.GELU, (5, 6, 2))
    inputs = [torch.randn(3, 2, requires_grad=True), torch.randn(3, 3)]
    leaves = [tensor.requires_grad_() for tensor in state]
    torch.library.opcheck(torch.ops.fxopt.mlp.default, (inputs, leaves, encode(2, steps)))


@needs_kernel
def test_refusals_say_what_was_expected() -> None:
    plan = encode(1, [Step(Op.LINEAR, (0, 1))])
    weight, bias = torch.randn(3, 4), torch.randn(3)
    run = op.call_of(plan)
    for inputs, state, words in (
        ([torch.randn(2, 5)], [weight, bias], r"weight \[N, 5\]"),
        ([torch.randn(2, 4)], [weight, torch.randn(2)], "vector of 3, found 2"),
        ([torch.randn(2, 4)], [weight], "reads tensor 1"),
        ([torch.randn(2, 4).double()], [weight, bias], "float32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(inputs, state, plan)


def test_weights_and_biases_of_any_strides() -> None:
    plan = encode(1, [Step(Op.LINEAR, (0, 1))])
    for weight in (
        torch.randn(3, 8)[:, ::2],
        torch.randn(3, 4, 2)[..., 1],
        torch.randn(4, 3).T,
        torch.randn(1, 4).expand(3, 4),
    ):
        x, bias = torch.randn(2, 4), torch.randn(6)[::2]
        torch.testing.assert_close(op.call_of(plan)([x], [weight, bias], plan), F.linear(x, weight, bias))


def test_plans_survive_encoding() -> None:
    steps = [
        Step(Op.LINEAR, (0, None, None, None, None), (0.0, 0.0)),
        Step(Op.CLAMP, (None,) * 5, (-0.5, float("inf"))),
    ]
    assert decode(encode(3, steps)) == steps
