"""fxopt::pointwise against its reference in float64: random plans, every operator on special values, every ISA."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from fxopt.kernels.pointwise import op, reference
from fxopt.kernels.pointwise.encode import plan_of, text
from fxopt.kernels.pointwise.plan import BINARY, REDUCTIONS, UNARY, Input, Operand, Output, Plan, Step
from fxopt.torch_internals.seeds import seed_started

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 7.0, 30.0, -30.0, 90.0, -105.0, 3e38, -3e38, 1e-40, math.inf, -math.inf]
TAME_UNARY = ("neg", "abs", "tanh", "sigmoid", "relu", "erf", "gelu", "silu", "softplus", "copy", "square")
TAME_BINARY = ("add", "sub", "mul", "maximum", "minimum", "clamp_min", "clamp_max", "prelu")


class Random:
    """A random plan; every value is an output or read by one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.axes = self.random.randint(1, 4)
        inputs = [Input(tuple(range(self.axes)))]
        for _ in range(self.random.randint(1, 4)):
            kept = [axis for axis in range(self.axes) if self.random.random() < 0.6]
            self.random.shuffle(kept)
            inputs.append(Input(tuple(self.random.choice([axis, axis, None]) for axis in kept)))
        self.inputs = tuple(inputs)
        self.steps: list[Step] = []
        for _ in range(self.random.randint(1, 14)):
            self.add()

    def axes_of(self, value: int) -> frozenset[int]:
        return Plan(self.axes, self.inputs, tuple(self.steps), ()).axes_of(value)

    def add(self) -> None:
        count = len(self.inputs) + len(self.steps)
        a, b, c = (self.random.randrange(count) for _ in range(3))
        inner = sorted(self.axes_of(a) - {0})
        if inner and self.random.random() < 0.25:
            start = self.random.randrange(len(inner))
            over = frozenset(inner[start : start + self.random.randint(1, 2)])
            self.steps.append(Step(self.random.choice(REDUCTIONS), (a,), self.axes_of(a) - over))
            return
        name = self.random.choice([*TAME_UNARY, *TAME_BINARY, "where", "fma"])
        operands = [a, b, c][: 1 if name in TAME_UNARY else 2 if name in TAME_BINARY else 3]
        axes = frozenset().union(*map(self.axes_of, operands))
        read: list[Operand] = [self.expanded(operand, axes) for operand in operands]
        if len(read) > 1 and name not in ("maximum", "minimum") and self.random.random() < 0.3:
            read[-1] = self.random.uniform(-1, 1)
            axes = frozenset().union(*(self.axes_of(v) for v in read if isinstance(v, int)))
        self.steps.append(Step(name, tuple(read), axes))

    def expanded(self, value: int, axes: frozenset[int]) -> int:
        if self.axes_of(value) == axes:
            return value
        self.steps.append(Step("expand", (value,), axes))
        return len(self.inputs) + len(self.steps) - 1

    def plan(self) -> Plan:
        outputs = []
        for value in range(len(self.inputs), len(self.inputs) + len(self.steps)):
            axes = self.axes_of(value)
            if 0 in axes and (self.random.random() < 0.5 or value == len(self.inputs) + len(self.steps) - 1):
                dims = [axis if axis in axes else None for axis in range(self.axes)]
                outputs.append(Output(value, tuple(d for d in dims if d is not None or self.random.random() < 0.5)))
        return Plan(self.axes, self.inputs, tuple(self.steps), tuple(outputs))

    def tensors(self, sizes: list[int]) -> list[Tensor]:
        return [self.tensor([1 if axis is None else sizes[axis] for axis in given.dims]) for given in self.inputs]

    def tensor(self, shape: list[int]) -> Tensor:
        kind = self.random.choice(["plain", "plain", "cut", "transposed", "bool", "int"])
        x = torch.randn(shape)
        if kind == "bool":
            return x > 0
        if kind == "int":
            return x.mul(3).to(self.random.choice([torch.int32, torch.int64]))
        if kind == "cut" and shape:
            return torch.randn([*shape[:-1], shape[-1] * 2 + 1])[..., 1::2][..., : shape[-1]]
        return torch.randn(shape[::-1]).permute(list(reversed(range(len(shape))))) if kind == "transposed" else x


@pytest.mark.parametrize("start", range(0, 120, 40))
def test_random_plans(isa: str, start: int) -> None:
    ran = 0
    for seed in range(start, start + 40):
        seed_started(seed)
        made = Random(seed)
        plan = made.plan()
        if not plan.outputs:
            continue
        assert plan_of(text(plan)) == plan
        for rows in (0, 1, 3, 70):
            tensors = made.tensors([rows, *made.random.sample([1, 2, 3, 5, 17, 33, 64], 3)])
            expected = reference.pointwise([t.double() for t in tensors], plan)
            for found, exact in zip(op.call(tensors, text(plan)), expected, strict=True):
                assert found.is_contiguous()
                torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5, msg=f"seed {seed}, {plan}")
        ran += 1
    assert ran > 20


@pytest.mark.parametrize("name", UNARY)
def test_unary_on_special_values(isa: str, name: str) -> None:
    values = torch.tensor([*SPECIAL, math.nan, *torch.linspace(-9, 9, 50).tolist()])
    plan = Plan(1, (Input((0,)),), (Step(name, (0,), frozenset({0})),), (Output(1, (0,)),))
    (found,), (expected,) = op.call([values], text(plan)), reference.pointwise([values], plan)
    atol = 1e-37
    if name == "gelu":  # far from 0 torch's vectors overflow earlier than its scalars, below 0 a difference cancels
        found, expected = (torch.where(values.abs() > 1e38, 0, each) for each in (found, expected))
        atol = 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in BINARY if name != "leaky_relu"])  # whose slope is a number
def test_binary_on_special_values(isa: str, name: str) -> None:
    values = torch.tensor([*SPECIAL, math.nan])
    if name in ("and", "or", "xor"):
        values = (values > 0).float()
    plan = Plan(
        2,
        (Input((0,)), Input((1,))),
        (*(Step("expand", (v,), frozenset({0, 1})) for v in (0, 1)), Step(name, (2, 3), frozenset({0, 1}))),
        (Output(4, (0, 1)),),
    )
    (found,), (expected,) = op.call([values, values], text(plan)), reference.pointwise([values, values], plan)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name != "peak"])
def test_reductions_keep_nan_and_infinity(isa: str, name: str) -> None:
    x = torch.randn(6, 35)
    x[0, 34], x[1, 3], x[2, 0], x[3] = math.nan, math.inf, -math.inf, -math.inf
    plan = Plan(2, (Input((0, 1)),), (Step(name, (0,), frozenset({0})),), (Output(1, (0,)),))
    (found,), (expected,) = op.call([x], text(plan)), reference.pointwise([x], plan)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_boolean_output_keeps_its_memory(isa: str) -> None:
    """A mask that leaves the call, though steps behind its last reader want memory."""
    row, cell = frozenset({0}), frozenset({0, 1})
    steps = (
        Step("gt", (0, 0.0), cell),
        Step("where", (1, 0, -9.0), cell),
        Step("peak", (2,), row),
        Step("expand", (3,), cell),
        Step("sub", (2, 4), cell),
        Step("exp", (5,), cell),
    )
    plan = Plan(2, (Input((0, 1)),), steps, (Output(1, (0, 1), boolean=True), Output(6, (0, 1))))
    x = torch.randn(70, 5)
    x[::3] = -1.0
    mask, powers = op.call([x], text(plan))
    assert torch.equal(mask, x > 0)
    torch.testing.assert_close(powers, reference.pointwise([x], plan)[1])


SOFTMAX = Plan(
    2,
    (Input((0, 1)), Input((1,))),
    (
        Step("expand", (1,), frozenset({0, 1})),
        Step("mul", (0, 2), frozenset({0, 1})),
        Step("peak", (3,), frozenset({0})),
        Step("expand", (4,), frozenset({0, 1})),
        Step("sub", (3, 5), frozenset({0, 1})),
        Step("exp", (6,), frozenset({0, 1})),
        Step("sum", (7,), frozenset({0})),
        Step("expand", (8,), frozenset({0, 1})),
        Step("div", (7, 9), frozenset({0, 1})),
    ),
    (Output(10, (0, 1)), Output(8, (0, None))),
)


def test_gradients() -> None:
    op.OPERATORS.load()
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    y, total = op.call([x, w], text(SOFTMAX))
    scaled = x * w
    expected = torch.softmax(scaled, 1), (scaled - scaled.detach().amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    weight = torch.randn(5, 7)
    found = torch.autograd.grad((y * weight).sum() + total.sum(), (x, w))
    right = torch.autograd.grad((expected[0] * weight).sum() + expected[1].sum(), (x, w))
    torch.testing.assert_close(found, right)
    (alone,) = torch.autograd.grad(op.call([x.detach(), w], text(SOFTMAX))[0].square().sum(), w)
    torch.testing.assert_close(alone, torch.autograd.grad(torch.softmax(x.detach() * w, 1).square().sum(), w)[0])


def test_opcheck() -> None:
    op.OPERATORS.load()
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7)
    torch.library.opcheck(torch.ops.fxopt.pointwise.default, ([x, w], text(SOFTMAX)))


def test_rows_over_threads() -> None:
    op.OPERATORS.load()
    x, w = torch.randn(3000, 40), torch.randn(40)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = op.call([x, w], text(SOFTMAX))
    torch.set_num_threads(2)
    together = op.call([x, w], text(SOFTMAX))
    torch.set_num_threads(threads)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.randn(5, 7), torch.randn(6), "size 6 at dim 0 instead of 7"),
        (torch.randn(5, 7, 1), torch.randn(7), "input 0 has 3 dims instead of 2"),
        (torch.randn(5, 7).double(), torch.randn(7), "dtype"),
    ],
)
def test_inputs_that_do_not_fit(x: Tensor, w: Tensor, message: str) -> None:
    op.OPERATORS.load()
    with pytest.raises(RuntimeError, match=message):
        op.call([x, w], text(SOFTMAX))


def test_the_headers_are_part_of_the_key() -> None:
    names = {path.name for path in op.KERNEL.files}
    assert {"kernels.h", "layout.h", "vector.h", "math.h", "avx2.h", "entry.h", "refused.h"} <= names
