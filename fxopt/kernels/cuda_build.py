"""Compiles a CUDA library with nvcc and caches it, next to the C++ libraries and by the same scheme (cache.py).

Its sources include no torch header: 5 CPU-seconds an architecture, where one such header costs 60.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fxopt import progress
from fxopt.locks import lock

from .build import EXPORTS
from .cache import BuildError, built, cached
from .includes import with_headers

_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-shared", "--cudart=static")
_SHOWN = ("-Xlinker", f"--version-script={EXPORTS}")  # no part of a key, as it names a folder
_OLDEST = (8, 0)  # with cp.async, and products of bf16
_TOLD = 5  # lines of the compiler's errors
_CHOICE = "CUDACXX or CUDA_HOME chooses an nvcc"
NO_COMPILER = f"nvcc is not on PATH ({_CHOICE})"
_loading = lock()
_outcomes: dict[tuple[Kernels, str], Any] = {}  # what this process has opened, or why it has not


@dataclass(frozen=True, eq=False)  # hashed at each launch: by identity, not by its fields
class CudaLibrary:
    """One .cu file and what it includes."""

    name: str
    source: Path
    flags: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()  # of (parameters, dtype, stream): a message, or null

    @property
    def files(self) -> dict[Path, str]:
        """What it is compiled from."""
        return with_headers([self.source])

    def key(self, arch: str) -> str:
        digest = hashlib.sha256()
        for part in (self.name, arch, *_FLAGS, *self.flags, EXPORTS.read_text()):
            digest.update(part.encode() + b"\0")
        for path, text in self.files.items():
            digest.update(f"{path.name}\0{text}".encode())
        return digest.hexdigest()[:16]

    def opened(self, arch: str) -> ctypes.CDLL:
        """The library for an architecture, with its functions declared. Raises BuildError and OSError."""
        return declared(self, build(self, arch))


def beside(module: str, name: str, *functions: str) -> CudaLibrary:
    """The library of the .cu file that stands beside a module and has its name. functions: as of a CudaLibrary."""
    return CudaLibrary(name, Path(module).with_suffix(".cu"), functions=functions)


class Kernels(Protocol):
    """What a GPU of an architecture needs: a library of nvcc's, or a kernel of NVRTC's."""

    def opened(self, arch: str) -> Any: ...


def arch_of(capability: tuple[int, int]) -> str:
    """nvcc's name of a device: (8, 0) is sm_80, and (9, 0) sm_90a, with the instructions only Hopper has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def arch_on(device: int) -> str:
    """The architecture of a GPU of this machine."""
    return arch_of(torch.cuda.get_device_capability(device))


def architectures() -> list[str]:
    """What this nvcc compiles the kernels for.

    Raises:
        BuildError: there is no nvcc.
    """
    listed = subprocess.run([_compiler(), "--list-gpu-code"], capture_output=True, text=True).stdout
    capabilities = [divmod(int(number), 10) for number in re.findall(r"sm_(\d+)$", listed, re.MULTILINE)]
    return [arch_of(capability) for capability in sorted(capabilities) if capability >= _OLDEST]


def serves(arch: str) -> bool:
    """Whether the kernels can be compiled for a GPU of this architecture."""
    return divmod(int(arch.strip("sm_a")), 10) >= _OLDEST


def check_served(arch: str) -> None:
    """Raises BuildError for a GPU that is too old."""
    if not serves(arch):
        raise BuildError(f"expected a GPU of {arch_of(_OLDEST)} or newer, found one of {arch}")


@functools.cache
def nvcc() -> Path | None:
    """CUDACXX, else CUDA_HOME's, else the one on PATH, else the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = (os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc")
    found = next((path for place in places if place and (path := shutil.which(place))), None)
    return Path(found).resolve() if found else None


def _compiler() -> str:
    if (compiler := nvcc()) is None:
        raise BuildError(f"no CUDA compiler: {NO_COMPILER}")
    return str(compiler)


def command(library: CudaLibrary, arch: str, output: Path, *more: str) -> list[str]:
    """The compiler's command line.

    Raises:
        BuildError: there is no nvcc.
    """
    number = arch.removeprefix("sm_")
    target = f"-gencode=arch=compute_{number},code={arch}"  # -arch=sm_90a would also make a plain sm_90
    return [_compiler(), *_FLAGS, *_SHOWN, *library.flags, target, *more, "-o", str(output), str(library.source)]


def _compiler_id() -> str | None:
    compiler = nvcc()
    if compiler is None:
        return None
    stat = compiler.stat()
    return hashlib.sha256(f"{compiler} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]


def find(library: CudaLibrary, arch: str) -> Path | None:
    """The cached library of this nvcc, or, on a machine without one, of any.

    Raises:
        BuildError: somebody else may have written it.
    """
    return cached(f"{library.name}-{arch}-{library.key(arch)}", _compiler_id(), f"{library.name}.so")


def build(library: CudaLibrary, arch: str) -> Path:
    """The path of the compiled library, compiling it when it is not cached.

    Raises:
        BuildError: a GPU that is too old, no nvcc, no place to write, or nvcc failed.
    """
    check_served(arch)
    if known := find(library, arch):
        return known
    words = command(library, arch, Path(f"{library.name}.so"))
    folder = f"{library.name}-{arch}-{library.key(arch)}-{_compiler_id()}"
    lock = f"{library.name}-{arch}"
    return built(f"{library.name}.so", folder, lock, lambda private: _run(words, private, f"{library.name} for {arch}"))


def _run(words: list[str], folder: Path, what: str) -> None:
    progress.step(f"compile {what}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    except OSError as error:
        raise BuildError(f"cannot run {words[0]}: {error.strerror} ({_CHOICE})") from error
    if done.returncode:
        told = first_errors(done.stderr + done.stdout) or [f"it ended with {done.returncode} and said nothing"]
        text = "\n  ".join(told)
        raise BuildError(f"nvcc could not compile {what}: {text}\n{_CHOICE}; this one ran: {' '.join(words)}")


def first_errors(told: str) -> list[str]:
    """A compiler's lines from the first error on, a few."""
    lines = [line for line in told.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    return lines[first : first + _TOLD]


@functools.cache
def loaded(library: Kernels, device: int) -> Any:
    """What `library` opens for a GPU of this machine; None where it cannot be had (a warning)."""
    found = _outcome(library, arch_on(device))
    return None if isinstance(found, str) else found


def missing(library: Kernels, device: int) -> str:
    """Why calls on a GPU of this machine do without the library, in one line; "" where they have it."""
    found = _outcome(library, arch_on(device))
    return found if isinstance(found, str) else ""


def _outcome(library: Kernels, arch: str) -> Any:
    """What it opens, or why there is none: built, and warned of, once in a process."""
    with _loading:
        if (library, arch) not in _outcomes:
            _outcomes[library, arch] = _opened(library, arch)
        return _outcomes[library, arch]


def _opened(library: Kernels, arch: str) -> Any:
    try:
        return library.opened(arch)
    except (BuildError, OSError) as error:
        _warn(str(error))
        return str(error).splitlines()[0]


@functools.cache
def _warn(reason: str) -> None:
    """Once for all libraries where the reason is the same: no nvcc."""
    warnings.warn(f"fxopt: PyTorch runs in place of CUDA kernels: {reason}", stacklevel=5)


def declared(library: CudaLibrary, path: Path) -> ctypes.CDLL:
    """A compiled library."""
    compiled = ctypes.CDLL(str(path))
    for name in library.functions:
        function = getattr(compiled, name)
        function.restype, function.argtypes = ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return compiled
