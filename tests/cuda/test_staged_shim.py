"""Narrow rows of plain bags by cp.async through shared memory: the same bits as without, in every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source
from tests.cuda.compare import assert_same, random_call
from tests.cuda.test_long_bags_shim import jagged


def bags(dtype, dim, lengths, ids_dtype=torch.int64, pool="sum"):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 50, (int(offsets[-1]),)).to(ids_dtype)
    column = Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1, include_last=True))
    return [ids, offsets], [torch.randn(50, dim).to(dtype)], Plan((column,), (dim,), ("float32",))


@pytest.mark.parametrize("lengths", [(7, 0, 1, 33, 4) * 4 + (2,), (40, 9), (700, 3), (1,), (0, 0)])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 4), (torch.float32, 12), (torch.bfloat16, 16), (torch.float16, 32)]
)
def test_equals_the_kernel_without(shim, mutant, dtype, dim, lengths):
    call = bags(dtype, dim, lengths, *((torch.int32, "mean") if dim == 16 else ()))
    (right,) = shim.run(*call)
    for seed in (1, 2):
        assert torch.equal(mutant.run(*call, seed)[0], right)
    assert mutant.failure() == ""


def test_a_bad_id_spoils_its_bag_alone(mutant):
    tensors, tables, plan = jagged(torch.float32, 12)
    tensors[0][640] = 50
    (found,) = mutant.run(tensors, tables, plan)
    assert "column=0 row=0 lane=640 value=50 rows=50" in mutant.failure()
    assert found.isnan().all(1).tolist() == [True, False, False]
    before = mutant.library.fxopt_cuda_clamped(0)
    (clamped,) = mutant.run(tensors, tables, replace(plan, bad_ids="clamp"))
    assert mutant.library.fxopt_cuda_clamped(0) - before == 1
    tensors[0][640] = 49
    assert torch.equal(clamped, mutant.run(tensors, tables, plan)[0])


def test_beside_columns_of_all_kinds(mutant, divides_as_cuda):
    """Boundaries use the same shared memory."""
    call = random_call(31, 9, 8)
    assert_same(call, mutant.run(call.tensors, call.tables, call.plan, 5)[0])
