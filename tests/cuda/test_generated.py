"""Kernels that NVRTC compiles: their limits, and what is told where they cannot be had. No GPU."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels import cuda_build, cuda_generated
from fxopt.kernels.cache import BuildError
from fxopt.kernels.cuda_generated import GeneratedKernel
from fxopt.kernels.pointwise.cuda import generated
from fxopt.kernels.pointwise.encode import text
from tests.cuda.test_compile import beyond_limits, compiled, needs_nvcc, touched_too_soon
from tests.cuda.test_pointwise_shim import every_step
from tests.kernels.test_pointwise import SOFTMAX


def nvrtc_or_skip():
    try:
        return cuda_generated.nvrtc()
    except OSError as error:
        pytest.skip(f"needs NVRTC: {error}")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_generated_kernels_keep_their_limits(tmp_path, arch):
    source = tmp_path / "generated.cu"
    steps, phases, held = every_step()[0], (0, 0), (32, 32)
    for plan, wide, by in (
        (SOFTMAX, False, phases),
        (SOFTMAX, True, phases),
        (steps, False, phases),
        (SOFTMAX, False, held),
    ):
        source.write_text(generated(text(plan), (torch.float32,) * 2, wide, by).source)
        library = cuda_build.CudaLibrary("generated", source, flags=("--fmad=false",))
        told = compiled(library, arch, tmp_path)
        assert beyond_limits(told) == []
        assert touched_too_soon(source.with_suffix(".ptx").read_text(), arch) == []


def test_without_nvrtc_the_report_says_so(monkeypatch, tmp_path):
    def missing():
        raise OSError("this PyTorch was built without CUDA")

    monkeypatch.setattr(cuda_generated, "nvrtc", missing)
    monkeypatch.setattr(cuda_build, "arch_on", lambda device: "sm_90a")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    kernel = GeneratedKernel("fxopt_missing", "", "missing")
    cuda_build._warn.cache_clear()
    with pytest.warns(UserWarning, match="PyTorch runs in place of CUDA kernels: no NVRTC"):
        assert "built without CUDA" in cuda_build.missing(kernel, 0)
    assert cuda_build.loaded(kernel, 0) is None


def test_an_older_gpu_is_named():
    with pytest.raises(BuildError, match="expected a GPU of sm_80 or newer, found one of sm_75"):
        GeneratedKernel("fxopt_old", "", "old").opened("sm_75")


def test_a_cubin_is_cached_by_what_it_is_made_of(monkeypatch, tmp_path):
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    kernel, other = (GeneratedKernel("fxopt_some", source, "some") for source in ("one", "two"))
    made = tmp_path / f"fxopt_some-sm_80-{kernel.key('sm_80')}-nvrtc13_0"
    made.mkdir()
    (made / "fxopt_some.cubin").write_bytes(b"code")
    assert cuda_generated.build(kernel, "sm_80").read_bytes() == b"code"
    assert len({kernel.key("sm_80"), kernel.key("sm_90a"), other.key("sm_80")}) == 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvrtc_compiles_what_is_generated(monkeypatch, tmp_path, arch):
    nvrtc_or_skip()
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    path = cuda_generated.build(generated(text(SOFTMAX), (torch.float32,) * 2), arch)
    assert b"pointwise_kernel" in path.read_bytes() and path.parent.name.startswith(f"fxopt_pointwise-{arch}-")
    with pytest.raises(BuildError, match=r"NVRTC could not compile fxopt_bad for .*: .*undefined"):
        cuda_generated.build(GeneratedKernel("fxopt_bad", "__device__ int f() { return y; }", "f"), arch)
