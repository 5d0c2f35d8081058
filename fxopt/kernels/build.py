"""Compiles a kernel library on first use and caches it.

A library's folder is named by a key (sources, flags, torch, CPU architecture) and by the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from fxopt import progress
from fxopt.torch_internals.python_tensor import readable

from .cache import BuildError, built, cached
from .includes import with_headers

# What a library shows to others. Where the compiler links the C++ runtime into it, or compiles for AVX-512, whoever is
# loaded later would use its std::ostream: cuDNN's engines crashed in that.
EXPORTS = Path(__file__).with_name("exports.map")
# Of libraries that are modules of Python; a key tells its versions apart.
PYTHON_CFLAGS = ("-O1", f"-DFXOPT_PYTHON={sys.implementation.cache_tag}")


@dataclass(frozen=True)
class Library:
    """Sources of one shared library.

    beside_cuda: it stands between torch and kernels for GPUs, and nobody else needs it.
    written: more sources, (file name, text), which the build writes; they name headers as from this folder.
    schemas: of the operators that C++ can call in it.
    """

    name: str
    sources: tuple[Path, ...]
    cflags: tuple[str, ...] = ("-O2",)
    beside_cuda: bool = False
    written: tuple[tuple[str, str], ...] = ()
    schemas: tuple[str, ...] = ()

    @property
    def files(self) -> dict[Path, str]:
        """What it is compiled from, without what is written."""
        return with_headers(self.sources, [(Path(__file__).parent, text) for _, text in self.written])

    @property
    def key(self) -> str:
        digest = hashlib.sha256()
        abi = str(torch.compiled_with_cxx11_abi())
        for part in (self.name, *self.cflags, EXPORTS.read_text(), torch.__version__, abi, platform.machine()):
            digest.update(part.encode() + b"\0")
        for name, text in (*((path.name, text) for path, text in self.files.items()), *self.written):
            digest.update(f"{name}\0{text}".encode())
        return digest.hexdigest()[:16]

    @property
    def folder(self) -> str:
        """Where it lies in a package; in the cache the compiler's name follows."""
        return f"{self.name}-{self.key}"


def find(library: Library) -> Path | None:
    """The library that the package brings, else the cached one of this compiler, or, on a machine without, of any.

    Raises:
        BuildError: somebody else may have written it.
    """
    return cached(library.folder, _compiler_id(), f"{library.name}.so")


def build(library: Library) -> Path:
    """The path of the compiled library, compiling it when it is not cached.

    Raises:
        BuildError: no C++ compiler, no place to write, the compiler failed, or what is there is not to be trusted.
    """
    if known := find(library):
        return known
    compiler = _compiler_id()
    if compiler is None:
        raise BuildError(f"no C++ compiler: {compiler_name()!r} is not on PATH (install g++, or set CXX)")
    folder = f"{library.folder}-{compiler}"
    return built(f"{library.name}.so", folder, library.name, functools.partial(_compile, library))


def imported(library: Library) -> ModuleType:
    """A library that is a module of Python, by its own name, and reads tensors past their methods.

    Raises:
        BuildError, ImportError: it cannot be compiled or loaded, or it does not read this Python's tensors right.
    """
    loader = ExtensionFileLoader(library.name, str(build(library)))
    spec = importlib.util.spec_from_loader(library.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if not readable(module):
        raise BuildError("the tensors of this Python cannot be read past their methods")
    return module


def _compile(library: Library, folder: Path) -> None:
    from torch.utils import cpp_extension  # pulls in setuptools: only a cold build pays for it

    progress.step(f"compile {library.name}")
    _find_ninja()
    for name, text in library.written:
        (folder / name).write_text(text)
    written = [folder / name for name, _ in library.written]
    try:
        cpp_extension.load(
            library.name,
            [str(path) for path in (*written, *library.sources)],
            extra_cflags=list(library.cflags),
            extra_ldflags=[f"-Wl,--version-script={EXPORTS}"],
            extra_include_paths=[str(Path(__file__).parent)],
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"compiling {library.name} failed: {error}") from error
    (made,) = folder.glob("*.so")  # a second build in one process is called name_v1
    made.rename(folder / f"{library.name}.so")


def _find_ninja() -> None:
    """cpp_extension runs `ninja` from PATH, where an environment that was not activated does not put it."""
    if shutil.which("ninja") is None:
        with contextlib.suppress(ImportError):
            import ninja

            os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])


def compiler_name() -> str:
    return os.environ.get("CXX", "c++")


def compiler_path() -> str | None:
    """The compiler's file; None where it is not on PATH."""
    words = compiler_name().split()
    return shutil.which(words[-1]) if words else None


def _compiler_id() -> str | None:
    """Names the compiler by its file, because running it to ask for its version would slow every warm start."""
    path = compiler_path()
    if path is None:
        return None
    real = os.path.realpath(path)
    stat = os.stat(real)
    return hashlib.sha256(f"{compiler_name()} {real} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]
