"""CUDA libraries on first use: by the device of the call, and told once where they cannot be built."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from fxopt.kernels import cuda_build
from fxopt.kernels.cache import BuildError
from fxopt.kernels.stage import op as stage
from fxopt.report.collect import notes
from fxopt.rewrites import cross_layers, linear_layers
from fxopt.rewrites.framework import editor
from tests.cuda import fake_nvcc
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten


def test_a_call_gets_the_library_of_its_device(monkeypatch, tmp_path):
    log = fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS, (9, 0), (8, 0), (9, 0))
    library = fake_nvcc.library(tmp_path)
    for _ in range(2):
        assert [cuda_build.loaded(library, device).arch() for device in (0, 1, 2)] == [90, 80, 90]
    assert cuda_build.missing(library, 1) == ""
    assert len(log.read_text().splitlines()) == 2
    fake_nvcc.as_another_process(monkeypatch)  # in which the other device comes first
    assert [cuda_build.loaded(library, device).arch() for device in (1, 0)] == [80, 90]
    assert len(log.read_text().splitlines()) == 2


def test_a_failed_build_is_one_warning(monkeypatch, tmp_path):
    log = fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.BROKEN, (9, 0), (9, 0))
    library = fake_nvcc.library(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        users = [threading.Thread(target=cuda_build.loaded, args=(library, device)) for device in (0, 1) * 4]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert cuda_build.loaded(library, 1) is None
    (text,) = [str(warning.message) for warning in caught]
    assert len(log.read_text().splitlines()) == 1
    what, then, advice = text.splitlines()
    assert what == (
        "fxopt: PyTorch runs in place of CUDA kernels: nvcc could not compile some_kernel for sm_90a: "
        'kernel.cu(3): error: identifier "pancake" is undefined'
    )
    assert then.strip().startswith("1 error detected")
    assert advice.startswith("CUDACXX or CUDA_HOME chooses an nvcc; this one ran: ")
    assert cuda_build.missing(library, 0) == what.partition("kernels: ")[2]
    with pytest.raises(BuildError, match="could not compile fxopt_stage for sm_90a"), pytest.warns(UserWarning):
        stage.kernel(0)


def test_one_architecture_may_fail_alone(monkeypatch, tmp_path):
    fails = f'case "$*" in *sm_80*) {fake_nvcc.BROKEN} ;; esac\n'
    fake_nvcc.install(monkeypatch, tmp_path, fails + fake_nvcc.WORKS, (8, 0), (9, 0))
    library = fake_nvcc.library(tmp_path)
    with pytest.warns(UserWarning, match="some_kernel for sm_80"):
        assert cuda_build.loaded(library, 0) is None
    assert cuda_build.loaded(library, 1).arch() == 90


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [((8, 0), "nvcc is not on PATH"), ((7, 5), "a GPU of sm_80 or newer, found one of sm_75")],
)
def test_what_keeps_all_libraries_is_one_warning(monkeypatch, tmp_path, gpu, reason):
    fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS, gpu)
    if gpu >= (8, 0):
        monkeypatch.setattr(cuda_build, "nvcc", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {cuda_build.loaded(fake_nvcc.library(tmp_path, name), 0) for name in "abc"} == {None}
    (warning,) = caught
    assert reason in str(warning.message)


def test_an_nvcc_that_does_not_run(monkeypatch, tmp_path):
    fake_nvcc.install(monkeypatch, tmp_path, "")
    (tmp_path / "nvcc").write_bytes(b"\x7fELF")
    with pytest.raises(BuildError, match=r"cannot run .*/nvcc: Exec format error \(CUDACXX"):
        cuda_build.build(fake_nvcc.library(tmp_path), "sm_80")


def crossed(x0, x, weight):
    return x0 * F.linear(x, weight) + x


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(editor, "missing", lambda library, device: f"no {library.name} on {device}")


def test_what_only_the_kernel_can_gain_is_left_alone(without_kernels):
    module = graph_of(crossed, [(6, 8), (6, 8), (1, 8)])
    before = names_of(module)
    (findings,) = rewritten(module, cross_layers.REWRITE)
    assert names_of(module) == before and not findings.changes
    (note,) = notes(findings.misses)
    assert note.text == "its CUDA kernel is not used: no fxopt_gpu_cross on 0"


def test_a_rewrite_that_is_good_without_it_says_that_it_goes_without(without_kernels):
    module = graph_of(lambda x, w, v: F.linear(torch.relu(F.linear(x, w)), v), [(6, 8), (16, 8), (4, 16)])
    (findings,) = rewritten(module, linear_layers.REWRITE)
    assert len(findings.changes) == 2 and "fxopt.gpu_linear" in names_of(module)
    (note,) = notes(findings.misses)
    assert note.text == "its CUDA kernel is not used: no fxopt_gpu_linear on 0"
