"""Kernels that a wheel brings: found by their key, trusted as those of the cache, and all that a cold machine needs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxopt.cli.prebuilt import SERVING
from fxopt.kernels import build as build_module
from fxopt.kernels import cache
from fxopt.kernels.build import Library, build, find
from fxopt.kernels.cache import BuildError

ROOT = Path(__file__).resolve().parents[2]
SERVED = """
import sys, warnings
import torch
warnings.simplefilter("error", UserWarning)
import fxopt
from fxopt.kernels.columns import op
from fxopt.runtime.native import native

assert fxopt.__file__.startswith(sys.argv[1]), fxopt.__file__
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(10, 4) for _ in range(5))
    def forward(self, ids):
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)

model, ids = Model().eval(), torch.randint(0, 10, (3, 5))
with torch.no_grad():
    assert torch.equal(fxopt.optimize(model)(ids), model(ids))
print(op.OPERATORS.compiled(), native() is not None)
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that the package brings: what stands there is not compiled."""
    source = tmp_path / "tiny.cpp"
    source.write_text("int tiny;\n")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "PREBUILT", tmp_path / "prebuilt")
    library = Library("tiny", (source,))
    brought = tmp_path / "prebuilt" / library.folder / "tiny.so"
    brought.parent.mkdir(parents=True)
    brought.write_bytes(b"compiled")
    return library


def test_it_comes_before_the_cache_with_any_compiler_and_without(
    tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tmp_path / "prebuilt" / tiny.folder / "tiny.so"
    for compiler in ("c++", "no-such-compiler"):
        monkeypatch.setenv("CXX", compiler)
        kept = tmp_path / "cache" / f"{tiny.folder}-{build_module._compiler_id()}" / "tiny.so"
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"compiled")
        assert find(tiny) == build(tiny) == expected


def test_one_of_other_sources_is_none(tiny: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.sources[0].write_text("int other;\n")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find(tiny) is None
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tiny)


def test_one_that_others_may_write_is_refused(tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = tmp_path / "prebuilt" / tiny.folder / "tiny.so"
    brought.chmod(0o666)
    with monkeypatch.context() as within:
        within.setattr(build_module, "_compiler_id", lambda: "a_compiler")
        assert find(tiny) is None, "it is compiled"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"refused .*tiny\.so, because it is code: others than its owner may write"):
        find(tiny)


@pytest.mark.slow
def test_a_wheel_with_kernels_serves_without_a_compiler(tmp_path: Path) -> None:
    known = {found.name for found in importlib.metadata.distributions()}
    if missing := {"pip", "setuptools"} - known:
        pytest.skip(f"{missing.pop()} is not installed, which makes wheels")
    if not all(map(find, SERVING)) and build_module.compiler_path() is None:
        pytest.skip("no C++ compiler, and the kernels are not built")
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "fxopt", source / "fxopt", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip, quiet = [sys.executable, "-m", "pip"], ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    wheel = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(tmp_path), "."]
    _run(wheel, cwd=source, env=os.environ | {"FXOPT_PREBUILT": "1"})
    (made,) = tmp_path.glob("fxopt-*.whl")
    assert "none-any" not in made.name, "it is for one platform"
    _run([*pip, "install", *quiet, "--target", str(target), str(made)], cwd=tmp_path, env=dict(os.environ))
    bare = {"PATH": "/nonexistent", "FXOPT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(target)}
    said = _run([sys.executable, "-c", SERVED, str(target)], cwd=tmp_path, env=bare)
    assert said == "True True\n"


def _run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
