"""Compiles a CUDA library with nvcc and caches it, next to the C++ libraries and by the same scheme (build.py).

Its sources include no torch header: 5 CPU-seconds an architecture, where one such header costs 60.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from .build import BuildError, cache_dir, locked

EARLY = Path(__file__).with_name("early.cuh")  # the header of kernels that are launched early
_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-shared", "--cudart=static")


@dataclass(frozen=True, eq=False)  # hashed at each launch: by identity, not by ten paths
class CudaLibrary:
    """One .cu file and what it includes."""

    name: str
    source: Path
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()  # of (parameters, dtype, stream): a message, or null

    def key(self, arch: str) -> str:
        digest = hashlib.sha256()
        for part in (self.name, arch, *_FLAGS, *self.flags):
            digest.update(part.encode() + b"\0")
        for path in sorted((self.source, *self.headers)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]


def arch_of(capability: tuple[int, int]) -> str:
    """nvcc's name of a device: (8, 0) is sm_80, and (9, 0) sm_90a, with the instructions only Hopper has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def nvcc() -> Path | None:
    """CUDACXX, else CUDA_HOME's, else the one on PATH, else the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = (os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc")
    found = next((path for place in places if place and (path := shutil.which(place))), None)
    return Path(found).resolve() if found else None


def command(library: CudaLibrary, arch: str, output: Path, *more: str) -> list[str]:
    """The compiler's command line.

    Raises:
        BuildError: there is no nvcc.
    """
    compiler = nvcc()
    if compiler is None:
        raise BuildError("no CUDA compiler: nvcc is not on PATH (set CUDA_HOME or CUDACXX)")
    number = arch.removeprefix("sm_")
    target = f"-gencode=arch=compute_{number},code={arch}"  # -arch=sm_90a would also make a plain sm_90
    return [str(compiler), *_FLAGS, *library.flags, target, *more, "-o", str(output), str(library.source)]


def _compiler_id() -> str | None:
    compiler = nvcc()
    if compiler is None:
        return None
    stat = compiler.stat()
    return hashlib.sha256(f"{compiler} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]


def find(library: CudaLibrary, arch: str) -> Path | None:
    """The cached library of this nvcc, or, on a machine without one, of any."""
    pattern = f"{library.name}-{arch}-{library.key(arch)}-{_compiler_id() or '*'}/{library.name}.so"
    return next(iter(sorted(cache_dir().glob(pattern))), None)


def build(library: CudaLibrary, arch: str) -> Path:
    """The path of the compiled library, compiling it when it is not cached.

    Raises:
        BuildError: no nvcc, no place to write, or nvcc failed.
    """
    if cached := find(library, arch):
        return cached
    target = cache_dir() / f"{library.name}-{arch}-{library.key(arch)}-{_compiler_id()}"
    built = target / f"{library.name}.so"
    words = command(library, arch, Path(built.name))
    try:
        with locked(library.name) as folder:
            if not target.exists():
                _run(words, folder)
                os.rename(folder, target)
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {cache_dir()}: {error}") from error
    return built


def _run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise BuildError(f"nvcc failed: {' '.join(words)}\n{done.stdout}{done.stderr}")


@functools.cache
def loaded(library: CudaLibrary) -> ctypes.CDLL | None:
    """The library for the current device, with its functions declared; None where it cannot be had."""
    try:
        return declared(library, build(library, arch_of(torch.cuda.get_device_capability())))
    except (BuildError, OSError):
        return None


def declared(library: CudaLibrary, path: Path) -> ctypes.CDLL:
    """A compiled library."""
    compiled = ctypes.CDLL(str(path))
    for name in library.functions:
        function = getattr(compiled, name)
        function.restype, function.argtypes = ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return compiled
