"""Compilers that stand for nvcc: they fail, or build a library that names its architecture."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from fxopt.kernels import cuda_build
from fxopt.kernels.cuda_build import CudaLibrary

BROKEN = """
echo 'kernel.cu(1): warning #1: it could be better' >&2
echo 'kernel.cu(3): error: identifier "pancake" is undefined' >&2
echo '1 error detected in the compilation of "kernel.cu".' >&2
exit 2
"""
WORKS = """
for word in "$@"; do
  case $before in -o) out=$word ;; esac
  case $word in *code=sm_*) arch=${word##*code=sm_} ;; esac
  before=$word
done
echo "int arch(void) { return ${arch%a}; }" | cc -shared -fPIC -x c -o "$out" -
"""
LISTS = 'if [ "$1" = --list-gpu-code ]; then printf "sm_75\\nsm_80\\nsm_90\\n"; exit; fi\n'


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, *gpus: tuple[int, int]) -> Path:
    """Makes `script` the nvcc of a machine with these GPUs and an empty cache. Its log has a line for each build."""
    nvcc, log = folder / "nvcc", folder / "log"
    nvcc.write_text(f"#!/bin/sh\n{LISTS}echo \"$@\" >> '{log}'\n{script}")
    nvcc.chmod(0o755)
    log.touch()
    monkeypatch.setattr(cuda_build, "nvcc", lambda: nvcc)
    monkeypatch.setenv("FXOPT_CACHE", str(folder / "cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device])
    as_another_process(monkeypatch)
    return log


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows nothing of GPUs and their libraries yet."""
    for name in ("arch_on", "loaded", "_warn"):
        monkeypatch.setattr(cuda_build, name, functools.cache(getattr(cuda_build, name).__wrapped__))
    monkeypatch.setattr(cuda_build, "_outcomes", {})


def library(folder: Path, name: str = "some_kernel") -> CudaLibrary:
    source = folder / "kernel.cu"
    source.touch()
    return CudaLibrary(name, source)
