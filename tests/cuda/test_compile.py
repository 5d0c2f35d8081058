"""The CUDA sources compile for both architectures without spilling; needs nvcc, no GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from fxopt.kernels import cuda_build
from fxopt.kernels.build import BuildError
from fxopt.kernels.columns.cuda import KERNEL
from fxopt.kernels.columns.cuda.tuning import VARIANTS
from fxopt.kernels.gpu_cross import op as gpu_cross
from fxopt.kernels.gpu_dots import op as gpu_dots
from fxopt.kernels.gpu_linear import op as gpu_linear
from fxopt.kernels.mlp import cuda as chains
from fxopt.kernels.row_update import op as row_update
from fxopt.kernels.stage import op as stage
from fxopt.kernels.target_attention import cuda as attention

needs_nvcc = pytest.mark.skipif(cuda_build.nvcc() is None, reason="needs nvcc")
LIBRARIES = [
    KERNEL,
    stage.KERNEL,
    gpu_linear.KERNEL,
    gpu_dots.KERNEL,
    gpu_cross.KERNEL,
    chains.KERNEL,
    attention.KERNEL,
    row_update.CUDA,
]
MOST_REGISTERS = 128  # 16 warps a multiprocessor; see columns.cu


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda k: k.name)
def test_no_spills(tmp_path, arch, library):
    command = cuda_build.command(library, arch, tmp_path / "kernel.cubin", "-Xptxas", "-v", "--Werror", "all-warnings")
    device_only = ["-cubin" if word == "-shared" else word for word in command]
    told = subprocess.run(device_only, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", told.stderr)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told.stderr)]
    assert spills and not any(spills), told.stderr
    assert registers and max(registers) <= MOST_REGISTERS


@needs_nvcc
def test_rows_kept_in_l2_compile(tmp_path):
    library = replace(KERNEL, flags=(*KERNEL.flags, *VARIANTS["rows kept in L2"]))
    command = cuda_build.command(library, "sm_90a", tmp_path / "kernel.cubin")
    told = subprocess.run(["-cubin" if w == "-shared" else w for w in command], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_without_nvcc_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_build, "nvcc", lambda: None)
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match="nvcc is not on PATH"):
        cuda_build.build(KERNEL, "sm_80")


def test_a_library_built_before_serves_without_nvcc(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_build, "nvcc", lambda: None)
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    folder = tmp_path / f"{KERNEL.name}-sm_90a-{KERNEL.key('sm_90a')}-0"
    folder.mkdir()
    (folder / f"{KERNEL.name}.so").touch()
    assert cuda_build.build(KERNEL, "sm_90a") == folder / f"{KERNEL.name}.so"
    with pytest.raises(BuildError):
        cuda_build.build(KERNEL, "sm_80")


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90a")])
def test_architectures(capability, arch):
    assert cuda_build.arch_of(capability) == arch
