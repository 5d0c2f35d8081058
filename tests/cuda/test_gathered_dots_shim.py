"""Dots of vectors that are read from embedding tables, through the shim."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Instr, Op, Plan, Source
from fxopt.kernels.interactions.cuda.gathered import KERNEL
from fxopt.kernels.interactions.serves import vectors
from tests.cuda.gathered import assert_close, bad, exact, example
from tests.cuda.planted import awake
from tests.cuda.shim_library import Shim, ShimError, _arrays
from tests.cuda.test_dot_rows import PAIRS, with_bugs

MUTATIONS = PAIRS | {
    "no bounds check": ("gathered.cu", "__any_sync(kAll, wanted &&", "__any_sync(kAll, !{} && wanted &&"),
    "vectors of another sample": ("gathered.cu", "int64_t(sample) * v", "int64_t(sample ^ {}) * v"),
    "vectors in another order": ("gathered.cu", "vector & 31)", "(vector & 31) ^ {})"),
    "not all chunks": ("gathered.cu", "if (!real) return;", "if (!real || ({} && chunk == 3)) return;"),
}  # fmt: skip


class Dots(Shim):
    """gathered.cu for the shim, with every bug planted and asleep."""

    def __init__(self, folder) -> None:
        self.library = with_bugs(KERNEL, folder, MUTATIONS)
        for name in ("failure", "dots"):
            getattr(self.library, f"fxopt_cuda_{name}").restype = ctypes.c_bool
        self.library.fxopt_cuda_clamped.restype = ctypes.c_longlong

    def dots(self, tensors, tables, plan, before, i, j, width, seed=0):
        rest, keep = (before, i, j), list[object]()
        arrays, call = _arrays(rest, keep), self.library.fxopt_cuda_dots
        run = lambda request, *more: call(request, arrays, ctypes.c_int64(width), *more)  # noqa: E731
        return self._call(tensors, tables, encode(plan), seed, run, more=rest)[0]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return Dots(tmp_path_factory.mktemp("gathered"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "T", "D"), [(1, 26, 64), (7, 8, 16), (16, 3, 48), (2, 31, 128), (0, 4, 16), (9, 17, 32)])
def test_equals_fp64(shim, dtype, B, T, D):
    for more in ({}, {"ids": torch.int32}, {"packed": False}, {"copied": False}):
        arguments = example(B, T, D, dtype, **more)
        assert vectors(arguments[2], D) == T + more.get("copied", True)
        assert_close(shim.dots(*arguments, seed=B), exact(*arguments))
    *arguments, width = arguments
    assert_close(shim.dots(*arguments, width + 3), exact(*arguments, width + 3))


def test_rows_that_are_not_aligned(shim):
    tensors, tables, plan, _, *rest = example(5, 4, 16)
    tables[1] = torch.randn(9, 19).bfloat16()[:, 3:]
    tensors[0] = torch.randn(5, 18).bfloat16()[:, 1:17]
    arguments = tensors, tables, plan, tensors[0], *rest
    assert_close(shim.dots(*arguments), exact(*arguments))


def test_programs_and_negative_ids(shim):
    tensors, tables, plan, *rest = example(6, 4, 16)
    columns = list(plan.columns)
    program = (Instr(Op.REMAINDER, "int64", a=5),)
    columns[2] = Column(Source(1, fixed=((1, 1),)), 1, 0, columns[2].offset, program=program)
    columns[3] = Column(Source(1, fixed=((1, 2),)), 2, 0, columns[3].offset, wrap_negative=True)
    tensors[1][:, 1] += 1000
    tensors[1][::2, 2] -= tables[2].shape[0]
    plan = Plan(tuple(columns), plan.widths, plan.dtypes)
    assert_close(shim.dots(tensors, tables, plan, *rest), exact(tensors, tables, plan, *rest))


def test_bad_ids_are_reported(shim):
    arguments = bad()
    found = shim.dots(*arguments)
    assert shim.failure().startswith("fxopt-bad-id column=2 row=3 lane=0 value=6 rows=6 ")
    assert shim.failure() == ""
    expected = _good(arguments)
    i, j = arguments[4:6]
    for row, column in ((3, 2), (1, 4)):
        expected[row, 16:][(i == column) | (j == column)] = float("nan")
    assert_close(found, expected)


def _good(arguments):
    """What row 0 of the tables would have given."""
    ids = arguments[0][1].clone()
    ids[3, 1] = ids[1, 3] = 0
    return exact([arguments[0][0], ids], *arguments[1:])


def test_bad_ids_are_moved(shim):
    arguments = bad("clamp")
    before = shim.library.fxopt_cuda_clamped(0)
    found = shim.dots(*arguments)
    assert shim.library.fxopt_cuda_clamped(0) - before == 2 and shim.failure() == ""
    arguments[0][1][3, 1], arguments[0][1][1, 3] = 5, 0
    assert_close(found, exact(*arguments))


def test_clamped_ids_of_rows_that_pad_a_batch_do_not_count(shim):
    arguments = bad("clamp")
    real = torch.tensor([2])
    arguments[1].append(real)  # a tensor of the call, so that it may be read
    before = shim.library.fxopt_cuda_clamped(0)
    shim.library.fxopt_cuda_real_rows(shim._name(real), ctypes.c_int64(6))
    try:
        shim.dots(*arguments)
    finally:
        shim.library.fxopt_cuda_real_rows(None, ctypes.c_int64(0))
    assert shim.library.fxopt_cuda_clamped(0) - before == 1


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
    arguments = example(6, 26, 32, dtype)
    if "bounds" in name:
        arguments[0][1][2, 25] = 10**6
    if "pairs" in name:
        arguments[4][0] = 31
    try:
        with awake(shim.library, MUTATIONS, name):
            found = shim.dots(*arguments, seed=3).double()
    except ShimError:
        return
    if "pairs" in name:
        assert not found[:, 32].isnan().any()
        return
    assert not torch.allclose(found, exact(*arguments), rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_refused(shim):
    tensors, tables, plan, *rest = example(4, 3, 16)
    with pytest.raises(RuntimeError, match="fxopt-unfit: column 2"):
        shim.dots(tensors, [tables[0], tables[1].float(), tables[2]], plan, *rest)
    with pytest.raises(RuntimeError, match="fxopt-unfit"):
        shim.dots(tensors, tables, plan, rest[0].float(), *rest[1:])
