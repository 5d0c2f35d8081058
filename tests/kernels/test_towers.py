"""fxopt::towers: the kernel against plain PyTorch in double, on every instruction set; what it refuses."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxopt.kernels.build import build
from fxopt.kernels.cache import BuildError
from fxopt.kernels.towers import op, reference
from fxopt.kernels.towers.plan import Buffer, Copy, Linear, Mixture, Plan, Product, Source, decode, encode, leveled
from fxopt.torch_internals.seeds import seed_started

Arguments = tuple[list[Tensor], list[Tensor], list[Tensor]]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> ctypes.CDLL:
    try:
        path = build(op.KERNEL)
    except BuildError as error:
        pytest.skip(f"no kernel: {error}")
    op.OPERATORS.load()
    return ctypes.CDLL(str(path))


@pytest.fixture(params=["avx512", "avx2", "scalar"])
def isa(request: pytest.FixtureRequest, kernel: ctypes.CDLL) -> Iterator[str]:
    kernel.fxopt_towers_isa(request.param.encode())
    yield request.param
    kernel.fxopt_towers_isa(None)


def program(seed: int) -> tuple[Plan, Arguments, list[int]]:
    """A random program, its weights and biases, and the shape of the inputs behind the rows."""
    r = random.Random(seed)
    K, F = r.choice((1, 3, 16, 37, 130)), r.choice((2, 5))
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    buffers: list[Buffer] = []
    steps: list = []
    readable = [(Source(0), K), *((Source(1, place), K) for place in range(F))]

    def linear(N: int, buffer: int, column: int) -> None:
        source, width = r.choice(readable)
        bias = r.random() < 0.7
        weights.append(torch.randn(N, width) / width**0.5)
        if bias:
            biases.append(torch.randn(N))
        activation = r.choice(("none", "relu", "sigmoid", "tanh"))
        steps.append(Linear(buffer, column, N, source, len(weights) - 1, len(biases) - 1 if bias else -1, activation))

    for _ in range(r.randint(2, 4)):
        E, D = r.randint(2, 5), r.choice((1, 5, 16, 48, 70))
        experts, gate, mixed, product = range(len(buffers), len(buffers) + 4)
        buffers += [Buffer(E * D, E, r.random() < 0.5), Buffer(E, 0, False), Buffer(D + 3), Buffer(D)]
        for e in range(E):
            linear(D, experts, e * D)
        linear(E, gate, 0)
        places = [Source(experts, -1, e * D, is_input=False) for e in range(E)]
        chosen = r.sample(places, E)
        steps.append(Mixture(mixed, 0, D, Source(gate, is_input=False), r.random() < 0.7, tuple(chosen)))
        linear(3, mixed, D)
        steps.append(Product(product, 0, D, places[0], Source(mixed, is_input=False)))
        readable += [(places[-1], D), (Source(mixed, is_input=False), D + 3), (Source(product, is_input=False), D)]
    buffers.append(Buffer(K))
    steps.append(Copy(len(buffers) - 1, 0, K, Source(1, F - 1)))
    return Plan((False, True), len(weights), len(biases), tuple(buffers), leveled(steps)), ([], weights, biases), [K, F]


def assert_right(found: list[Tensor], arguments: Arguments, plan: Plan) -> None:
    """Within twice eager's own error against double, plus rounding."""
    exact = reference.towers(*([t.double() for t in part] for part in arguments), plan)  # type: ignore[call-arg]
    eager = reference.towers(*arguments, plan)
    for y, e, x in zip(found, eager, exact, strict=True):
        assert y.shape == e.shape and y.is_contiguous()
        if y.numel():
            assert (y - x).abs().max() <= 2 * (e - x).abs().max() + 3e-6 * max(1.0, float(x.abs().max()))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, isa: str) -> None:
    seed_started(seed)
    plan, (_, weights, biases), (K, F) = program(seed)
    run = op.call_of(encode(plan))
    assert decode(encode(plan)) == plan
    for rows in ((0,), (1,), (2,), (13,), (49,), (250,), (3, 5)):
        arguments = ([torch.randn(*rows, K), torch.randn(*rows, F, K)], weights, biases)
        assert_right(run(*arguments, encode(plan)), arguments, plan)


def test_inputs_of_any_layout(isa: str) -> None:
    plan, (_, weights, biases), (K, F) = program(3)
    run = op.call_of(encode(plan))
    for x, z in (
        (torch.randn(K, 9).t(), torch.randn(F, 9, K).transpose(0, 1)),
        (torch.randn(9, 2 * K)[:, ::2], torch.randn(K, F, 9).permute(2, 1, 0)),
        (torch.randn(1, K).expand(9, K), torch.randn(9, F + 2, K)[:, 1 : F + 1]),
        (torch.randn(4, 7, K)[:, ::3], torch.randn(3, 4, F, K).transpose(0, 1)),
    ):
        arguments = ([x, z], [w.t().contiguous().t() for w in weights], biases)
        assert_right(run(*arguments, encode(plan)), arguments, plan)


def test_threads_share_rows_or_columns() -> None:
    threads = torch.get_num_threads()
    weights = [torch.randn(600, 700) / 26 for _ in range(6)]
    buffers = tuple(Buffer(600) for _ in weights)
    plan = Plan((False,), 6, 0, buffers, leveled([Linear(i, 0, 600, Source(0), i, -1) for i in range(6)]))
    try:
        torch.set_num_threads(2)
        for rows in (1, 3, 9, 300):
            arguments = ([torch.randn(rows, 700)], weights, [])
            assert_right(op.call_of(encode(plan))(*arguments, encode(plan)), arguments, plan)
    finally:
        torch.set_num_threads(threads)


def test_passes_opcheck() -> None:
    steps = [Linear(0, 0, 4, Source(0, 1), 0, 0, "relu"), Product(1, 0, 3, Source(0, 0), Source(0, is_input=False))]
    plan = Plan((True,), 1, 1, (Buffer(4, 2), Buffer(3)), leveled(steps))
    weights, biases = [torch.randn(4, 3, requires_grad=True)], [torch.randn(4)]
    torch.library.opcheck(torch.ops.fxopt.towers.default, ([torch.randn(5, 2, 3)], weights, biases, encode(plan)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    plan, (_, weights, biases), (K, F) = program(1)
    given = [[t.to(dtype) for t in part] for part in ([torch.randn(3, K), torch.randn(3, F, K)], weights, biases)]
    with pytest.raises(RuntimeError, match="expected float32 inputs"):
        torch.ops.fxopt.towers(*given, encode(plan))


def test_gradients_of_any_order_where_they_are_asked_for() -> None:
    plan, (_, weights, biases), (K, F) = program(2)
    weights = [w.double().requires_grad_(i % 2 == 0) for i, w in enumerate(weights)]
    biases = [b.double() for b in biases]
    x, z = torch.randn(2, K).double(), torch.randn(2, F, K).double().requires_grad_()
    run = op.call_of(encode(plan))

    def total(z: Tensor) -> Tensor:
        return sum(y.sin().sum() for y in run([x, z], weights, biases, encode(plan)))  # type: ignore[return-value]

    assert torch.autograd.gradcheck(total, z)
    first = torch.autograd.grad(total(z), z, create_graph=True)[0]
    assert first.requires_grad


@pytest.mark.parametrize(
    ("inputs", "weight", "bias", "reason"),
    [
        ((2, 4), (5, 3), (5,), "columns"),
        ((2, 3), (6, 3), (5,), "6 rows"),
        ((2, 3), (5, 3), (4,), "bias 0"),
        ((2, 2), (5, 3), (5,), "columns"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: tuple, weight: tuple, bias: tuple, reason: str) -> None:
    source = Source(0, -1, 0 if inputs[1] < 4 else 2)
    plan = Plan((False,), 1, 1, (Buffer(5),), leveled([Linear(0, 0, 5, source, 0, 0)]))
    with pytest.raises(RuntimeError, match=reason):
        op.call_of(encode(plan))([torch.randn(inputs)], [torch.randn(weight)], [torch.randn(bias)], encode(plan))
