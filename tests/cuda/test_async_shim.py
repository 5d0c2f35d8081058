"""The shim's cp.async, by a kernel in which threads read what their neighbours copied."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cuda.shim_library import CUDA, compile_shim

# Rows of 32 chunks through a ring of two: a thread copies chunk `lane` of each row and adds the next one's.
SOURCE = """
#include "async.cuh"
using namespace fxopt::cuda;
struct Sums { const float4* rows; float4* out; int n; };
__global__ void sums_kernel(const __grid_constant__ Sums s) {
  __shared__ __align__(16) float4 ring[2][32];
  const int lane = int(threadIdx.x) & 31;
  float4 sum{0, 0, 0, 0};
  for (int row = -1; row < s.n; row++) {
    const int ahead = row + 1;
    copy_async(&ring[ahead & 1][lane], s.rows + ahead * 32 + lane, shim::planted == 1 || ahead < s.n);
    commit_copies();
    if (row < 0) continue;
    if (shim::planted == 2) wait_copies<2>();
    else wait_copies<1>();
    if (shim::planted != 3) __syncwarp();
    const float4 one = ring[row & 1][(lane + 1) & 31];
    sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
    if (shim::planted != 4) __syncwarp();
  }
  if (shim::planted != 5) wait_copies<0>();
  s.out[lane] = sum;
}
SHIM_EXPORT void sums(const Sums* s) {
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = dim3(1);
  config.blockDim = dim3(32);
  cudaLaunchKernelEx(&config, sums_kernel, *s);
}
"""


class Sums(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("async")
    (folder / "sums.cu").write_text(SOURCE)
    return ctypes.CDLL(str(compile_shim(folder, folder / "sums.cu", "-O0", f"-I{CUDA}")))


def called(library, bug, seed):
    """Whether the sums are right, and what the shim complains about."""
    rows, out = torch.randn(9, 32, 4), torch.full((32, 4), 7.0)
    library.shim_name(ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.nbytes))
    library.shim_seed(ctypes.c_uint64(seed))
    library.shim_plant(bug)
    library.sums(ctypes.byref(Sums(rows.data_ptr(), out.data_ptr(), 9)))
    library.shim_forget(ctypes.c_void_p(rows.data_ptr()))
    text = ctypes.create_string_buffer(256)
    library.shim_problem(text)
    return torch.allclose(out, rows.sum(0).roll(-1, 0), atol=1e-5), text.value.decode()


@pytest.mark.parametrize(
    ("bug", "complaint"),
    [
        (1, "a load outside every tensor"),  # no mask of the tail
        (2, ""),  # a wait for one group less
        (3, ""),  # no barrier after the wait
        (4, ""),  # no barrier before the place is used again
        (5, "copies that nobody waits for"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_bugs_show(library, bug, complaint, seed):
    assert called(library, 0, seed) == (True, "")
    right, told = called(library, bug, seed)
    assert told == complaint and (complaint or not right)
