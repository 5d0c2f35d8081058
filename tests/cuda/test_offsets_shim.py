"""Offsets from lengths in one launch, through the shim and on a GPU: as PyTorch's sums, and wrong lengths reported."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from fxopt.kernels import reports
from fxopt.kernels.columns import jagged
from fxopt.kernels.columns.cuda.offsets import asked
from fxopt.kernels.columns.errors import LateError, check
from fxopt.kernels.columns.op import load_cuda
from tests.cuda.shim_library import Shim, ShimError

SIZES = (0, 1, 7, 512, 4096, 4097, 33 * 4096 + 5, 70 * 4096)


def by_shim(shim: Shim, lengths, ids, exact=True, counts=None):
    with reports.padded(None, 1, counts or {}):
        found, memory, kept = asked(lengths, ids, exact)
    found.fill_(-1)
    named = [shim._name(t) for t in (kept, found)]
    text = ctypes.create_string_buffer(256)
    shim.library.fxopt_cuda_offsets.restype = ctypes.c_bool
    assert shim.library.fxopt_cuda_offsets(memory, None, 0, text), text.value
    shim._finish(named)
    return found


def example(n, dtype=torch.int64):
    lengths = torch.randint(0, 9, (n,)).to(dtype)
    return lengths, torch.zeros(int(lengths.sum()), dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", SIZES)
def test_sums_of_any_number(shim, n, dtype):
    lengths, ids = example(n, dtype)
    assert torch.equal(by_shim(shim, lengths, [ids, ids.float()]), jagged.offsets(lengths, [ids], True))
    assert torch.equal(by_shim(shim, lengths.repeat_interleave(2)[::2], [ids]), jagged.offsets(lengths, [ids], True))
    assert shim.failure() == ""


@pytest.mark.parametrize("n", [1, 9, 5000])
def test_wrong_lengths_are_reported_and_the_sums_are_still_there(shim, n):
    lengths, ids = example(n)
    lengths[n // 2] = 5
    total = int(lengths.sum())
    for rows, exact in ((total - 1, True), (total + 1, True), (total - 1, False)):
        assert by_shim(shim, lengths, [ids.new_zeros(total), ids.new_zeros(rows)], exact)[-1] == total
        assert f"fxopt-late fxopt.jagged_offsets: lengths of {total} ids in all, found {rows}" in shim.failure()
    by_shim(shim, lengths, [ids.new_zeros(total + 1)], exact=False)
    assert shim.failure() == ""
    lengths[n // 2] = -2
    by_shim(shim, lengths, [ids.new_zeros(max(0, total - 7))])
    assert f"expected lengths of at least 0, found -2 at {n // 2}" in shim.failure()


def test_of_padded_ids_the_real_ones_count(shim):
    lengths, ids = example(50)
    padded, count = torch.zeros(1000, dtype=torch.int64), torch.tensor([len(ids)])
    counts = {padded.data_ptr(): count.data_ptr()}
    shim._name(count)
    assert by_shim(shim, lengths, [padded], counts=counts)[-1] == len(ids) and shim.failure() == ""
    count += 1
    shim._name(count)
    by_shim(shim, lengths, [padded], counts=counts)
    assert f"lengths of {len(ids)} ids in all, found {len(ids) + 1}" in shim.failure()


def test_nothing_is_read_behind_the_lengths(shim):
    lengths, ids = example(300)
    with reports.padded(None, 1):
        found, memory, kept = asked(lengths, [ids], True)
    memory = memory[:16] + struct.pack("<q", len(lengths) + 1) + memory[24:]  # the third field is n
    named, text = [shim._name(t) for t in (kept, found)], ctypes.create_string_buffer(256)
    shim.library.fxopt_cuda_offsets(memory, None, 0, text)
    with pytest.raises(ShimError):
        shim._finish(named)
    shim.failure()


@pytest.mark.gpu
@pytest.mark.parametrize("n", SIZES)
def test_on_a_gpu(n):
    lengths, ids = (t.cuda() for t in example(n))
    assert load_cuda(0)
    for dtype in (torch.int32, torch.int64):
        given = lengths.to(dtype)
        assert torch.equal(torch.ops.fxopt.jagged_offsets(given, [ids], True), jagged.offsets(given, [ids], True))
        check()
        torch.ops.fxopt.jagged_offsets(given, [ids.new_zeros(len(ids) + 1)], True)
        with pytest.raises(LateError, match=f"lengths of {len(ids)} ids in all, found {len(ids) + 1}"):
            check()
