"""Generated pointwise kernels: the source that a GPU runs, compiled for the CPU by the shim, against the reference."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from fxopt.kernels.pointwise import reference
from fxopt.kernels.pointwise.cuda import pointwise_on_cuda
from fxopt.kernels.pointwise.cuda.geometry import divisor, geometry_of, is_wide
from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.plan import BINARY, REDUCTIONS, UNARY, Input, Output, Plan, Step
from tests.cuda.generated import Kernels, exact, in_phases, key_of, several_values
from tests.cuda.planted import awake
from tests.cuda.shim_library import ShimError
from tests.kernels.test_pointwise import SOFTMAX, SPECIAL, Random

ROW, CELL = frozenset({0}), frozenset({0, 1})
MUTATIONS = {
    "no barrier": ("__syncthreads();", "if (!{}) __syncthreads();"),
    "half a sum": ("int width = lanes / 2;", "int width = lanes / 2 >> {};"),
    "no mask of the items": ("if (item >= items) continue;", "if (item >= items && !{}) continue;"),
    "no mask of a sum's items": ("item < items ? lane : length", "item < items || {} ? lane : length"),
    "the sum of another row": ("kept[c.place8 + int(row)]", "kept[c.place8 + int({} ? 0 : row)]"),
    "a column left out": ("at < length;", "at < length - {};"),
    "rows behind the last": ("c.rows - first < c.block_rows ?", "c.rows - first < c.block_rows && !{} ?"),
    "the rows of the first block": ("row_of_all = first + row", "row_of_all = ({} ? 0 : first) + row"),
}
HELD_MUTATIONS = {
    "half a sum": ("int width = lanes / 2;", "int width = lanes / 2 >> {};"),
    "no mask of a sum's numbers": ("if (a1 < c.size1) v8", "if (a1 < c.size1 || {}) v8"),
    "written behind the row": ("if (place(lane, k) < size) row", "if (place(lane, k) < size || {}) row"),
    "read behind the row": ("place(lane, k) < size ? __ldg", "place(lane, k) < size || {} ? __ldg"),
    "read behind the last row": ("row < rows ? row : 0", "row < rows || {} ? row : 0"),
    "the rows of the first block": ("row_of_all = first + (", "row_of_all = ({} ? 0 : first) + ("),
}
PLANTED = [(False, name) for name in MUTATIONS] + [(True, name) for name in HELD_MUTATIONS]


def random_cases(seeds: range, sizes_of_rows: tuple[int, ...]) -> list[tuple[int, Plan, list[list[Tensor]], bool]]:
    """Plans with tensors of several sizes, all of the same dtypes."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        made = Random(seed)
        plan = made.plan()
        inner, state, batches = made.random.sample([1, 2, 3, 5, 17, 33, 64], 3), made.random.getstate(), []
        for rows in sizes_of_rows:
            made.random.setstate(state)
            batches.append(made.tensors([rows, *inner]))
        if plan.outputs:
            found.append((seed, plan, batches, seed % 4 == 0))
    return found


def test_random_plans(tmp_path):
    cases = random_cases(range(40), (0, 1, 3, 29))
    kernels = Kernels(tmp_path, [key_of(plan, batches[0], wide) for _, plan, batches, wide in cases])
    for seed, plan, batches, wide in cases:
        for inputs in batches:
            for given, expected in zip(kernels(inputs, plan, wide, seed), exact(inputs, plan), strict=True):
                torch.testing.assert_close(given.double(), expected, rtol=2e-5, atol=2e-5, msg=f"seed {seed}, {plan}")
    assert len(cases) > 20


def every_step() -> tuple[Plan, list[Tensor]]:
    """Every elementwise step on special values, an output each; all pairs of them for two operands."""
    names = [*UNARY, *BINARY, "where", "fma"]
    steps = [Step("expand", (v,), CELL) for v in (0, 1)]
    count = {name: 1 if name in UNARY else 2 if name in BINARY else 3 for name in names}
    steps += [Step(name, ((2, 3, 2)[: count[name]]), CELL) for name in names if name != "leaky_relu"]
    steps.append(Step("leaky_relu", (2, 0.1), CELL))
    outputs = tuple(Output(value, (0, 1)) for value in range(4, 2 + len(steps)))
    values = torch.tensor([*SPECIAL, math.nan])
    return Plan(2, (Input((0,)), Input((1,))), tuple(steps), outputs), [values, values.clone()]


def test_special_values(tmp_path):
    plan, inputs = every_step()
    found = Kernels(tmp_path, [key_of(plan, inputs)])(inputs, plan)
    for step, given, expected in zip(plan.steps[2:], found, reference.pointwise(inputs, plan), strict=True):
        if step.op == "gelu":  # torch's vectors overflow earlier
            given, expected = (torch.where(inputs[0][:, None].abs() > 1e38, 0, y) for y in (given, expected))
        assert_alike(given, expected, step.op)


def assert_alike(given: Tensor, expected: Tensor, name: str) -> None:
    exactly = name in BINARY or name == "where"
    tolerances = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 2e-6, "atol": 1e-6 if name == "gelu" else 1e-37}
    torch.testing.assert_close(given, expected, equal_nan=True, msg=lambda text: f"{name}: {text}", **tolerances)


def test_reductions_keep_nan_and_infinity(tmp_path):
    x = torch.randn(6, 35)
    x[0, 34], x[1, 3], x[2, 0], x[3] = math.nan, math.inf, -math.inf, -math.inf
    steps = tuple(Step(name, (0,), ROW) for name in REDUCTIONS)
    plan = Plan(2, (Input((0, 1)),), steps, tuple(Output(1 + at, (0,)) for at in range(len(steps))))
    found = Kernels(tmp_path, [key_of(plan, [x])])([x], plan)
    torch.testing.assert_close(found, reference.pointwise([x], plan), equal_nan=True)
    with pytest.raises(RuntimeError, match="extremum over no numbers"):
        geometry_of(text(plan), (6, 0))


@pytest.fixture(scope="module")
def softmaxes(tmp_path_factory):
    """By whether rows are held in registers."""
    inputs = torch.randn(1, 9), torch.randn(9)
    found = {True: Kernels(tmp_path_factory.mktemp("held"), [key_of(SOFTMAX, inputs)], HELD_MUTATIONS)}
    with in_phases():
        found[False] = Kernels(tmp_path_factory.mktemp("phases"), [key_of(SOFTMAX, inputs)], MUTATIONS)
    return found


@contextmanager
def held_or_in_phases(softmaxes, held):
    with several_values(), nullcontext() if held else in_phases():
        yield softmaxes[held], torch.randn(300, 9), torch.randn(9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("held", [False, True])
def test_any_order_of_warps(softmaxes, held, seed):
    with held_or_in_phases(softmaxes, held) as (softmax, x, w):
        found = softmax([x, w], SOFTMAX, seed=seed)
    for given, expected in zip(found, exact([x, w], SOFTMAX), strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-6)


def test_threads_that_have_several_values(tmp_path):
    plan = Plan(2, (Input((0, 1)), Input((0, 1))), (Step("mul", (0, 1), frozenset({0, 1})),), (Output(2, (0, 1)),))
    kernels = Kernels(tmp_path, [key_of(plan, [torch.randn(1, 9)] * 2)])
    for rows in (1, 255, 256, 257, 1000):
        x, y = torch.randn(rows, 9), torch.randn(rows, 9)
        with several_values():
            (found,) = kernels([x, y], plan)
        torch.testing.assert_close(found, x * y)


SCALED = Plan(
    2, (Input((0, 1)), Input((1,))), (Step("expand", (1,), CELL), Step("mul", (0, 2), CELL)), (Output(3, (0, 1)),)
)


TOGETHER = [
    (SOFTMAX, [(300, 9), (1, 9), (0, 9), (517, 9)]),
    (SCALED, [(7, 128), (300, 8), (1, 1), (0, 5), (3000, 1)]),
]


def calls_of_sizes(sizes: list[tuple[int, int]]) -> list[Tensor]:
    return [tensor for rows, size in sizes for tensor in (torch.randn(rows, size), torch.randn(size))]


@pytest.mark.parametrize(("plan", "sizes"), TOGETHER)
def test_calls_of_one_plan_as_one_launch(tmp_path, plan, sizes):
    """Each has rows of its own, and sizes of its own where there are no sums."""
    inputs = calls_of_sizes(sizes)
    found = Kernels(tmp_path, [key_of(plan, inputs)])(inputs, plan)
    calls = [exact(call, plan) for call in reference.calls_of(inputs, plan)]
    for given, expected in zip(found, [output for call in calls for output in call], strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("held", "name"), PLANTED)
def test_planted_bugs_are_caught(softmaxes, held, name):
    with held_or_in_phases(softmaxes, held) as (softmax, x, w):
        try:
            with awake(softmax.library, HELD_MUTATIONS if held else MUTATIONS, name):
                found = softmax([x, w], SOFTMAX, seed=1)
        except ShimError:
            return
    assert any(not torch.allclose(y.double(), z, rtol=1e-4) for y, z in zip(found, exact([x, w], SOFTMAX), strict=True))


LENGTHS = [1, 3, 4, 5, 31, 64, 100, 128, 129, 416, 1000, 1024, 1025]


@pytest.fixture(scope="module")
def of_every_length(tmp_path_factory):
    rows = [[torch.randn(1, size), torch.randn(size)] for size in LENGTHS]
    return Kernels(tmp_path_factory.mktemp("lengths"), [key_of(SOFTMAX, inputs) for inputs in rows])


@pytest.mark.parametrize("size", LENGTHS)
def test_rows_of_every_length(of_every_length, size):
    x, w = torch.randn(19, size), torch.randn(size)
    held = geometry_of(text(SOFTMAX), (19, size)).held
    assert math.prod(held) >= size if size <= 1024 else held == (0, 0)
    found = of_every_length([x, w], SOFTMAX)
    for given, expected in zip(found, exact([x, w], SOFTMAX), strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-6)


def mixed(dims: tuple[int, ...]) -> Plan:
    """A softmax along the last of three axes, of an input that has some of the others, and a sum that it weighs."""
    own, some, every = frozenset(dims) - {2}, frozenset(dims), frozenset({0, 1, 2})
    steps = (
        *(Step("peak", (0,), own), Step("expand", (2,), some), Step("sub", (0, 3), some), Step("exp", (4,), some)),
        *(Step("sum", (5,), own), Step("expand", (6,), some), Step("div", (5, 7), some), Step("expand", (8,), every)),
        *(Step("mul", (1, 9), every), Step("sum", (10,), CELL)),
    )
    return Plan(3, (Input(dims), Input((0, 1, 2))), steps, (Output(11, (0, 1)), Output(10, (0, 1, 2))))


DIMS = [(0, 2), (1, 2), (2,)]
CELLS = [(1, 1, 1), (5, 7, 3), (3, 200, 3), (70, 9, 40)]


def of_axes(dims: tuple[int, ...], sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn([sizes[axis] for axis in dims]), torch.randn(sizes)]


@pytest.fixture(scope="module")
def of_several_axes(tmp_path_factory):
    keys = [key_of(mixed(dims), of_axes(dims, sizes)) for dims in DIMS for sizes in CELLS]
    return Kernels(tmp_path_factory.mktemp("axes"), keys)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("sizes", CELLS)
def test_rows_of_several_axes(of_several_axes, dims, sizes):
    x, y = of_axes(dims, sizes)
    plan = mixed(dims)
    assert geometry_of(text(plan), sizes).held[0]
    found = of_several_axes([x, y], plan)
    for given, expected in zip(found, exact([x, y], plan), strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit():
    x, w = torch.randn(5, 7), torch.randn(7)
    for inputs, message in (
        ([x, w[:6]], "input 1 has size 6 at dim 0 instead of 7"),
        ([x[:, :, None], w], "input 0 has 3 dims instead of 2"),
        ([x], "expected 2 inputs, found 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pointwise_on_cuda(inputs, text(SOFTMAX))
    torch.testing.assert_close(pointwise_on_cuda([x, w], text(SOFTMAX)), reference.pointwise([x, w], SOFTMAX))
    kept = Plan(3, (Input((0, 1, 2)),), (Step("sum", (0,), CELL), Step("exp", (1,), CELL)), (Output(2, (0, 1)),))
    assert geometry_of(text(kept), (4, 12288, 2)).fits and geometry_of(text(kept), (4, 99999, 2)).fits
    kept = Plan(3, kept.inputs, (*kept.steps, Step("sum", (2,), ROW)), (Output(3, (0,)),))
    assert geometry_of(text(kept), (4, 12288, 2)).fits and not geometry_of(text(kept), (4, 12289, 2)).fits


def test_sizes_beyond_32_bits():
    row = torch.empty(1).expand(3, 1 << 30)
    assert is_wide([row], row.shape) and not is_wide([row[:1]], (1, 1 << 30))
    apart = torch.empty_strided((2, 2), (1 << 31, 1), device="meta")
    assert is_wide([apart], (2, 2)) and not is_wide([apart[:1]], (1, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 26, 64, 429, 4097, 65535, (1 << 30) + 1, (1 << 31) - 1])
def test_a_product_and_a_shift_divide(size):
    magic, shift = divisor(size)
    numbers = [0, 1, size - 1, size, size + 1, 7 * size - 1, 7 * size, (1 << 31) - 1]
    for n in (n for n in numbers if n < 1 << 31):
        assert ((n * magic >> 32) + n) >> shift == n // size
