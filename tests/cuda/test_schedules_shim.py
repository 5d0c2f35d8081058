"""The shim's schedules: a warp may be far behind the others, so a missing barrier shows also behind collectives."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cuda.shim_library import compile_shim

# Thread by thread what a thread of the next warp wrote, after some collectives of the own warp.
SOURCE = """
#include <cuda_runtime.h>
struct Turned { const float* from; float* to; };
__global__ void turned_kernel(const __grid_constant__ Turned turned) {
  __shared__ float values[128];
  const int thread = int(threadIdx.x);
  values[thread] = __ldg(turned.from + thread);
  if (!shim::planted) __syncthreads();
  for (int k = 0; k < 20; k++) __syncwarp();
  turned.to[thread] = values[(thread + 32) % 128];
}
SHIM_EXPORT void turned(const Turned* turned) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  cudaLaunchKernelEx(&config, turned_kernel, *turned);
}
"""


class Turned(ctypes.Structure):
    _fields_ = [("from", ctypes.c_void_p), ("to", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "turned.cu").write_text(SOURCE)
    return ctypes.CDLL(str(compile_shim(folder, folder / "turned.cu")))


def right(library, missing, seed):
    values, found = torch.randn(128), torch.zeros(128)
    library.shim_name(ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.nbytes))
    library.shim_seed(ctypes.c_uint64(seed))
    library.shim_plant(int(missing))
    library.turned(ctypes.byref(Turned(values.data_ptr(), found.data_ptr())))
    library.shim_forget(ctypes.c_void_p(values.data_ptr()))
    return torch.equal(found, values.roll(-32))


def test_a_missing_barrier_shows_behind_collectives(library):
    assert all(right(library, False, seed) for seed in range(40))
    assert not all(right(library, True, seed) for seed in range(40))
