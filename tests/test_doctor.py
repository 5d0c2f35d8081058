"""`python -m fxopt doctor` and `cache`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxopt import cli, doctor
from fxopt.doctor import Check, checks
from fxopt.kernels import build, cache
from tests.cuda import fake_nvcc


def having(name: str) -> Check:
    return next(check for check in checks() if check.name == name)


def test_every_problem_says_what_to_do() -> None:
    found = checks()
    assert {"torch", "torchrec", "processor", "compiler", "kernels", "CUDA", "cache", "threads"} <= {
        check.name for check in found
    }
    assert all(check.todo for check in found if check.state != "ok")


def test_what_costs_speed_alone_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: [Check("threads", "advice", "9 threads on 1 core", "set fewer")])
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.split() == ["slow", "threads", "9", "threads", "on", "1", "core", "set", "fewer"]


def test_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with monkeypatch.context() as within:
        within.setattr(build, "find", lambda library: tmp_path)
        assert having("compiler").state == "ok", "every kernel is built"
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    assert having("compiler").state == "problem"
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "install g++ or set CXX" in " ".join(out.split()) and err == ""


def test_kernels_that_are_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "empty"))
    found = having("kernels")
    assert found.state == "advice" and found.found.startswith("0 of ") and "fxopt build" in found.todo
    assert having("cache").found == f"{tmp_path}/empty: 0 entries, 0 bytes"
    assert not (tmp_path / "empty").exists()  # looking changes nothing


def test_a_library_that_others_may_write_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(library: object) -> None:
        raise cache.BuildError("refused lib.so, because it is code: others than its owner may write it")

    monkeypatch.setattr(build, "find", refused)
    assert having("kernels").state == "problem" and "FXOPT_CACHE" in having("kernels").todo


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "file" / "cache"))
    found = having("cache")
    assert found.state == "problem" and "FXOPT_CACHE" in found.todo


@pytest.mark.parametrize(
    ("threads", "cores", "state", "words"),
    [(2, 2, "ok", ""), (8, 2, "advice", "OMP_NUM_THREADS=2"), (1, 4, "advice", "large batches could use more")],
)
def test_threads(threads: int, cores: int, state: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "_cores", lambda: cores)
    found = having("threads")
    assert found.state == state and words in found.todo


@pytest.mark.parametrize(
    ("torch_version", "torchrec", "fbgemm", "state", "words"),
    [
        ("2.13.0", "1.8.0", "1.8.0", "ok", ""),
        ("2.13.0", "1.8.0", "1.7.0", "advice", "torchrec==1.8.*"),
        ("2.12.1+cpu", "1.8.0", "1.8.0", "advice", "torchrec==1.7.*"),
        ("2.13.0", "1.8.0", None, "problem", "torchrec needs fbgemm"),
        ("2.13.0", None, None, "ok", ""),
    ],
)
def test_packages_that_fit(
    torch_version: str,
    torchrec: str | None,
    fbgemm: str | None,
    state: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(doctor, "_installed", lambda *names: torchrec if names[0] == "torchrec" else fbgemm)
    found = next(check for check in doctor._packages() if check.name == "torchrec")
    assert found.state == state and words in found.todo


@pytest.mark.parametrize(("version", "state"), [("2.13.0", "ok"), ("2.10.0", "problem"), ("2.19.0.dev1", "advice")])
def test_versions_of_torch(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert next(iter(doctor._packages())).state == state


def test_a_gpu_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    there = list(doctor._cuda())
    assert there[0].found.endswith("A GPU") and there[1].name == "nvcc" and there[1].state == "advice"
    monkeypatch.setattr(doctor.cuda_build, "nvcc", lambda: None)
    assert list(doctor._cuda())[1].state == "problem"


def test_cache_is_shown_and_cleaned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    library = tmp_path / "fxopt_mlp-0123456789abcdef-deadbeef"
    library.mkdir()
    (library / "fxopt_mlp.so").write_bytes(b"1" * 3000)
    (tmp_path / "timings-0123456789abcdef.json").write_text("{}")
    kept = [tmp_path / "fxopt_mlp.lock", tmp_path / "notes.txt", tmp_path / "timings-of-mine.json"]
    for path in kept:
        path.write_text("")
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 2 entries, 3 kB\n"
    assert cli.main(["cache", "--clean"]) == 0
    assert capsys.readouterr().out.endswith("removed 3 kB\n")
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert cache.cache_dir() == tmp_path
