"""CUDA's allocator, streams and library, as the kernels and captures of CUDA graphs reach for them."""

from __future__ import annotations

import sys

import pytest
import torch

from fxopt.torch_internals.cuda import bytes_of_pool, current_raw_stream, driver, forget_pool, nvrtc, torch_cuda


@pytest.mark.gpu
def test_the_current_stream_has_a_number() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_raw_stream(stream.device_index) == stream.cuda_stream, (
            "_cuda_getCurrentRawStream: fxopt/kernels/cuda_call.py would launch on another stream than the caller's"
        )


@pytest.mark.gpu
def test_torchs_library_has_the_runtime() -> None:
    library = torch_cuda()
    names = "aoti_torch_get_current_cuda_stream", "cudaStreamCreateWithFlags", "cudaThreadExchangeStreamCaptureMode"
    gone = [name for name in names if not hasattr(library, name)]
    assert not gone, f"libtorch_cuda.so has no {gone}: fxopt/kernels/side_stream.py and columns/cuda need them"


@pytest.mark.gpu
def test_a_pool_that_nobody_captures_into_is_refused() -> None:
    with pytest.raises(RuntimeError):
        forget_pool(torch.cuda.current_device(), torch.cuda.graph_pool_handle())


@pytest.mark.gpu
def test_a_pool_is_measured_and_its_numbers_stay() -> None:
    graph, number = torch.cuda.CUDAGraph(), 10**6  # above 256: Python keeps no such number by itself
    x = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.graph(graph, pool=(0, number)):
        y = x + 1
    pool = (0, int(str(number)))
    before = sys.getrefcount(pool[1])
    held = bytes_of_pool(pool)
    after = sys.getrefcount(pool[1])
    assert held >= y.nbytes, "memory_snapshot: no segment_pool_id: fxopt/runtime/graph_memory.py counts nothing"
    assert after == before, "bytes_of_pool lets go of a number that it does not own"
    assert bytes_of_pool((0, number + 1)) == 0


@pytest.mark.gpu
def test_the_driver_and_its_compiler_are_there() -> None:
    names = "cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernelEx"
    gone = [name for name in names if not hasattr(driver(), name)]
    assert not gone, f"libcuda.so has no {gone}: fxopt/kernels/cuda_generated.py launches with them"
    assert hasattr(nvrtc(), "nvrtcGetCUBIN"), "fxopt/kernels/cuda_generated.py compiles with it"


def test_a_build_without_cuda_has_no_compiler() -> None:
    if torch.version.cuda is None:
        with pytest.raises(OSError, match="built without CUDA"):
            nvrtc()


def test_a_build_without_cuda_has_no_stream() -> None:
    assert (current_raw_stream is None) == (torch.version.cuda is None), (
        "torch._C._cuda_getCurrentRawStream is gone: fxopt/kernels/cuda_call.py launches kernels with it"
    )
