"""CUDA libraries on a GPU, in processes of their own: one whose nvcc fails, and one with GPUs of two architectures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda.fake_nvcc import BROKEN

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

WITHOUT_KERNELS = """
import warnings, torch, fxopt
from tests.cuda.compare import Two

ids, model = torch.randint(0, 10, (5, 2), device="cuda"), Two().cuda()
optimized = fxopt.optimize(model)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(optimized(ids), model(ids))
    optimized(ids).sum().backward()
told = [str(warning.message) for warning in caught]
assert sum("could not compile fxopt_columns_cuda for sm_" in text for text in told) == 1, told
report = " ".join(str(fxopt.report(optimized)).split())
assert "its CUDA kernel is not used: nvcc could not compile fxopt_columns_cuda for sm_" in report, report
"""

TWO_ARCHITECTURES = """
import torch
from fxopt.kernels import cuda_build
from fxopt.kernels import reports
from fxopt.kernels.columns import cuda, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.op import columns
from fxopt.kernels.mlp.cuda import cross
from tests.cuda.compare import random_call

cuda_build.arch_on = cuda.arch_on = lambda device: ("sm_90a", "sm_90")[device]
call = random_call(0, 21, 12)
(expected,) = reference.columns(call.tensors, call.tables, call.plan)
for device in (1, 0, 1):
    tensors, tables = ([t.to(f"cuda:{device}") for t in given] for given in (call.tensors, call.tables))
    (found,) = columns(tensors, tables, encode(call.plan))
    assert reports.failure(device) is None and found.get_device() == device
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    x0, x, weight = (torch.randn(n, 8, device=device) for n in (5, 5, 1))
    found = cross.gpu_cross(x0, x, weight, None, None)
    torch.testing.assert_close(found, cross.reference(x0, x, weight, None, None), rtol=1e-4, atol=1e-4)
for first, second in ((cuda._current[0], cuda._current[1]),
                      (cuda_build.loaded(cross.KERNEL, 0), cuda_build.loaded(cross.KERNEL, 1))):
    assert "-sm_90a-" in first._name and "-sm_90-" in second._name
"""


def run(script: str, **environment: str) -> None:
    settings = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_nvcc_that_fails_is_told_once_and_reported(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{BROKEN}")
    nvcc.chmod(0o755)
    run(WITHOUT_KERNELS, CUDACXX=str(nvcc), FXOPT_CACHE=str(tmp_path / "cache"))


def test_gpus_of_two_architectures():
    """The second one says that it goes without sm_90a's instructions."""
    if [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())][:2] != [(9, 0)] * 2:
        pytest.skip("needs two GPUs of Hopper")
    run(TWO_ARCHITECTURES)
