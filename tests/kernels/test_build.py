"""The kernel cache survives kills and rivals; without a compiler the reference runs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fxopt import kernels
from fxopt.kernels.build import Library, build, find
from fxopt.kernels.cache import BuildError
from fxopt.kernels.cuda_build import CudaLibrary
from fxopt.kernels.libraries import BESIDE_CUDA, CUDA_LIBRARIES, LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A library that compiles in a moment, and an empty cache."""
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int fxopt_answer() { return 42; }\n')
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    return Library("tiny", (source,), cflags=("-O0",))


def start(tiny):
    """A process that builds from its first moment on, for it has imported everything: kills meet it at that."""
    builder = FORK.Process(target=grouped_build, args=(tiny,))
    builder.start()
    os.setpgid(builder.pid, builder.pid)
    return builder


def grouped_build(tiny):
    os.setpgid(0, 0)  # its compiler dies with it
    build(tiny)


def kill(builder):
    with contextlib.suppress(ProcessLookupError):  # it may have ended, and been waited for by a later start
        os.killpg(builder.pid, signal.SIGKILL)
    builder.join()


def test_builds_once(tiny):
    assert find(tiny) is None
    path = build(tiny)
    changed = path.stat().st_mtime_ns
    assert build(tiny) == path == find(tiny) and path.stat().st_mtime_ns == changed
    assert [p.name for p in path.parents[1].iterdir() if p.name.startswith(".")] == []


def test_every_library_can_be_built_ahead():
    """`python -m fxopt build` and `make test` compile what is listed."""
    names = (found.name for found in pkgutil.walk_packages(kernels.__path__, "fxopt.kernels."))
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    found = {value.name for value in values if isinstance(value, Library | CudaLibrary)}
    assert {library.name for library in (*LIBRARIES, *BESIDE_CUDA, *CUDA_LIBRARIES)} == found


def test_key_follows_the_sources(tiny):
    before = tiny.key
    tiny.sources[0].write_text("int other;\n")
    assert tiny.key != before


def test_key_follows_what_the_sources_include(tiny):
    folder = tiny.sources[0].parent
    (folder / "near.h").write_text(
        '#pragma once\n  #  include "deep/far.h"\n#include "shim_alone.h"\n#include <vector>\n'
    )
    (folder / "deep").mkdir()
    (folder / "deep" / "far.h").write_text('#include "../near.h"\n')
    tiny.sources[0].write_text('#include "near.h"\n' + tiny.sources[0].read_text())
    assert [*tiny.files] == [folder / "deep" / "far.h", folder / "near.h", tiny.sources[0]]
    old = tiny.key
    (folder / "deep" / "far.h").write_text("int far();\n")
    assert tiny.key != old


@pytest.mark.parametrize("flag", ["", " -static-libstdc++"])
def test_a_library_shows_its_own_names_alone(tiny, monkeypatch, flag):
    """Not those of templates or of a C++ runtime inside it, which libraries that are loaded later would use."""
    compiler = tiny.sources[0].with_name("compiler")
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")}{flag} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    tiny.sources[0].write_text(
        "#include <sstream>\n#include <vector>\n"
        '[[gnu::visibility("default")]] std::vector<long> texts(4);\n'
        'extern "C" long fxopt_answer() { std::ostringstream s; s << texts.size(); return 38 + std::stol(s.str()); }\n'
    )
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", build(tiny)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in shown.splitlines()] == ["fxopt_answer"]
    assert ctypes.CDLL(str(find(tiny))).fxopt_answer() == 42


def test_survives_kills_by_four_at_once(tiny):
    """20 SIGKILLs at random moments, four builders at a time: whatever is left, the next process copes."""
    rng, killed = random.Random(0), 0
    while killed < 20:
        builders = [start(tiny) for _ in range(4)]
        for builder in builders:
            time.sleep(rng.uniform(0, 0.4))
            kill(builder)
            killed += 1
        left = find(tiny)
        assert left is None or "42" in call(left)
        if left is not None and killed < 20:
            shutil.rmtree(left.parent)
    builders = [start(tiny) for _ in range(4)]
    for builder in builders:
        builder.join(60)
        assert builder.exitcode == 0
    assert "42" in call(find(tiny))
    assert not list(Path(os.environ["FXOPT_CACHE"]).glob(".building-*"))


def call(path):
    code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).fxopt_answer())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_lock_of_a_killed_process_is_free(tiny):
    builder = start(tiny)
    while not list(Path(os.environ["FXOPT_CACHE"]).glob("*.lock")) and builder.is_alive():
        time.sleep(0.001)
    kill(builder)
    assert build(tiny).exists()


def test_without_a_compiler(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: 'no-such-compiler'"):
        build(tiny)


def test_a_compiler_that_only_fails(tiny, monkeypatch):
    monkeypatch.setenv("CXX", shutil.which("false"))
    with pytest.raises(BuildError, match="compiling tiny failed"):
        build(tiny)


def test_built_ahead_for_a_machine_without_a_compiler(tiny, monkeypatch):
    path = build(tiny)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(tiny) == path


def test_says_what_the_compiler_said(tiny):
    tiny.sources[0].write_text("this is not C++\n")
    with pytest.raises(BuildError, match="compiling tiny failed"):
        build(tiny)


@pytest.mark.parametrize("spoil", ["file", "folder", "everybody"])
def test_what_others_may_write_is_refused(tiny, spoil):
    path = build(tiny)
    spoilt, mode = (path.parent, 0o775) if spoil == "folder" else (path, 0o775 if spoil == "file" else 0o757)
    spoilt.chmod(mode)
    for use in (find, build):
        with pytest.raises(BuildError, match=rf"refused .* code: others .*{spoilt.name} \(mode {mode:o};"):
            use(tiny)
    spoilt.chmod(0o755)
    assert build(tiny) == path


def test_what_another_user_made_is_refused(tiny, monkeypatch):
    path = build(tiny)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid:
        with pytest.raises(BuildError, match=f"belongs to user {path.stat().st_uid}, who is neither this one"):
            find(tiny)
    else:
        assert find(tiny) == path  # root's is everybody's


def test_others_may_read_what_a_generous_builder_made(tiny):
    before = os.umask(0o002)
    try:
        path = build(tiny)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755 and not path.stat().st_mode & 0o022
    assert find(tiny) == path


NOBODY = """
import ctypes, os, sys
from pathlib import Path
from fxopt.kernels.build import Library, build
os.setuid(65534)
path = build(Library("tiny", (Path(sys.argv[1]),), cflags=("-O0",)))
print(ctypes.CDLL(str(path)).fxopt_answer(), os.access(path.parent, os.W_OK))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_built_as_root_used_by_nobody(tiny, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        source = shutil.copy(tiny.sources[0], folder)
        monkeypatch.setenv("FXOPT_CACHE", f"{folder}/cache")
        build(Library("tiny", (Path(source),), cflags=("-O0",)))
        command = [sys.executable, "-c", NOBODY, source]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "42 False\n", done.stderr


def test_unwritable_cache(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match="FXOPT_CACHE"):
        build(tiny)


FALLBACK = """
import warnings, torch
from fxopt.kernels.columns import errors, op
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Plan, Source
ids, table = torch.tensor([3, 1]), torch.randn(5, 4, requires_grad=True)
plan = Plan((Column(Source(0), 0, 0, 0),), (4,), ("float32",))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        (found,) = op.columns([ids], [table], encode(plan))
assert found.equal(table[ids])
assert [str(w.message) for w in caught if "without the compiled kernel" in str(w.message)].__len__() == 1, caught
found.sum().backward()
assert table.grad.sum() == 8
try:
    op.columns([ids + 3], [table], encode(plan))
except RuntimeError as error:
    print(errors.explain(error, plan))
"""


def test_reference_runs_without_a_compiler(tmp_path):
    env = {**os.environ, "CXX": "no-such-compiler", "FXOPT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FALLBACK], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "column 0: id 6 at row 0 is outside table 0 with 5 rows"
