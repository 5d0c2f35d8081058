"""The CUDA kernel on the CPU, through shim/: no GPU needed, and no GPU's word on speed or on memory order."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.autograd import _make_split
from fxopt.kernels.columns.encode import encode, plan_of
from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source
from tests.cuda.compare import assert_same, random_call
from tests.cuda.shim_library import CUDA, ShimError, compile_shim


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 21, 40])
@pytest.mark.parametrize("seed", range(5))
def test_kernel_equals_reference(shim, divides_as_cuda, seed, rows):
    call = random_call(seed * 100 + rows, rows, 6)
    (found,) = shim.run(call.tensors, call.tables, call.plan, seed)
    assert shim.failure() == ""
    assert_same(call, found)


def test_every_schedule_gives_the_same_bits(shim):
    call = random_call(7, 9, 6)
    first, *others = (shim.run(call.tensors, call.tables, call.plan, seed)[0] for seed in range(3))
    assert all(torch.equal(first.nan_to_num(), other.nan_to_num()) for other in others)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_the_references(shim, divides_as_cuda, seed, rows):
    call = random_call(seed * 100 + rows, rows, 8, ("lookup", "dense_pool", "bag"))
    needs = (False,) * len(call.tensors), (True,) * len(call.tables)
    by_kernel = tuple("cuda" if t.dtype == torch.float32 else "" for t in call.tables)
    part = _make_split(call.plan, *needs, by_kernel, (False,) * len(call.tables), (True,) * len(call.plan.widths)).dense
    if part is None:
        pytest.skip("no column of this call has a gradient in the kernel")
    tables = [call.tables[t].detach().clone().requires_grad_() for t in part.tables]
    outputs = reference.columns(call.tensors, tables, plan_of(part.plan), check=False)
    grads = [torch.randn_like(o) for o in outputs]
    expected = torch.autograd.grad(outputs, tables, grads)
    found, again = (shim.backward(grads, call.tensors, tables, part.plan, seed) for _ in range(2))
    for a, b, c in zip(found, expected, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert torch.equal(a, c)
    for exact in (True, False):
        sparse = shim.row_gradients(grads, call.tensors, tables, part.plan, exact)
        for (rows, grad), dense in zip(sparse, found, strict=True):
            assert not exact or (rows[1:] > rows[:-1]).all()
            assert torch.equal(torch.zeros_like(dense).index_put((rows,), grad, accumulate=True), dense)
            assert len(rows) <= len(dense)


def test_a_row_of_many_ids_is_summed_in_order(shim):
    ids = torch.cat([torch.zeros(300), torch.randint(0, 3, (100,)), torch.full((90,), 2)]).long()
    plan = Plan((Column(Source(0), 0, 0, 0), Column(Source(0), 1, 0, 6)), (11,), ("float32",))
    tables, grad = [torch.zeros(7, 6), torch.zeros(3, 5)], torch.randn(490, 11)
    found = shim.backward([grad], [ids], tables, encode(plan))
    expected = [torch.zeros_like(t).index_add_(0, ids, g) for t, g in zip(tables, grad.split([6, 5], 1), strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_more_tensors_than_a_launch_carries(shim):
    n = 4100
    tensors = [torch.randint(0, 5, (1,)) for _ in range(n)]
    table = torch.randn(5, 4)
    plan = Plan(tuple(Column(Source(k), 0, 0, 4 * k) for k in range(n)), (4 * n,), ("float32",))
    (found,) = shim.run(tensors, [table], plan)
    assert torch.equal(found, table[torch.cat(tensors)].reshape(1, -1))


def one_column(ids, **more):
    return [ids], [torch.randn(7, 8)], Plan((Column(Source(0), 0, 0, 0, **more),), (8,), ("float32",))


def test_the_first_bad_id_is_reported_and_never_followed(shim):
    ids = torch.randint(0, 7, (300,))
    ids[[290, 41]] = torch.tensor([-1, 7])
    tensors, tables, plan = one_column(ids)
    (found,) = shim.run(tensors, tables, plan)
    assert "fxopt-bad-id column=0 row=41 lane=0 value=7 rows=7" in shim.failure()
    assert found.isnan().any(1).nonzero().flatten().tolist() == [41, 290]
    assert shim.failure() == ""


def test_an_error_is_raised_by_the_next_call(shim):
    shim.run(*one_column(torch.tensor([9])))
    with pytest.raises(RuntimeError, match="fxopt-bad-id column=0 row=0 lane=0 value=9 rows=7"):
        shim.run(*one_column(torch.tensor([1])))
    shim.run(*one_column(torch.tensor([1])))


def test_clamp_takes_the_nearest_row(shim):
    tensors, tables, plan = one_column(torch.tensor([3, 9, -2, 6]))
    before = shim.library.fxopt_cuda_clamped(0)
    (found,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    assert torch.equal(found, tables[0][[3, 6, 0, 6]]) and shim.failure() == ""
    assert shim.library.fxopt_cuda_clamped(0) - before == 2


def test_unchecked_follows_the_id(shim):
    ids, (table,), plan = one_column(torch.tensor([3, 6]))
    plan = replace(plan, bad_ids="unchecked")
    (found,) = shim.run(ids, [table], plan)
    assert torch.equal(found, table[[3, 6]])
    with pytest.raises(ShimError, match="a load outside every tensor"):
        shim.run([torch.tensor([3, 2 * 10**9])], [table], plan)  # 64 GB behind it: no other tensor lies there
    assert shim.failure() == ""


def test_gradients_of_clamped_ids_go_to_the_nearest_row(shim):
    (ids,), (table,), plan = one_column(torch.tensor([3, 9, -2, 6]))
    grad = torch.randn(4, 8)
    (found,) = shim.backward([grad], [ids], [table], encode(replace(plan, bad_ids="clamp")))
    assert torch.allclose(found, torch.zeros_like(table).index_add_(0, ids.clamp(0, 6), grad))


@pytest.mark.parametrize("offsets", [[0, 20, 10], [1, 2, 3], [0, 2, 99], [0, -1, 3]])
def test_broken_offsets_are_reported(shim, offsets):
    ids = torch.randint(0, 7, (30,))
    tensors, tables, plan = one_column(ids, pool="sum", bag=Offsets(1))
    shim.run([*tensors, torch.tensor(offsets)], tables, plan)
    assert "expected them to start at 0" in shim.failure()


def test_a_plan_that_does_not_fit_is_an_error(shim):
    tensors, tables, plan = one_column(torch.rand(5))
    with pytest.raises(RuntimeError, match="ids must be integers after the program"):
        shim.run(tensors, tables, plan)


@pytest.mark.parametrize("flags", [(), ("-DFXOPT_STAGED",)])
def test_sanitizers_find_nothing(tmp_path, flags):
    runtime = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("this compiler brings no AddressSanitizer")
    library = compile_shim(
        tmp_path, CUDA / "columns.cu", "-O0", *flags, "-fsanitize=address,undefined", "-fno-sanitize-recover"
    )
    settings = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.cuda.sanitized", str(library)],
        env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
