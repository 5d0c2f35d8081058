"""Kernels whose source is written for one plan: compiled by NVRTC, which torch brings, and cached as libraries are.

NVRTC takes 0.1 to 0.3 s where nvcc takes 2, and needs no installed toolkit.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxopt import progress
from fxopt.torch_internals.cuda import driver, nvrtc

from .cache import BuildError, built, cached
from .cuda_build import check_served, first_errors

_FLAGS = ("-std=c++17", "--fmad=false")  # what two phases compute must be the same number in both
Asked = Callable[..., int]
_EARLY = (9, 12030)  # early.cuh: the architecture, and the driver, that start a kernel before the one in front ends


@dataclass(frozen=True, eq=False)  # as CudaLibrary: by identity
class GeneratedKernel:
    """name: of its cubins in the cache; function: the kernel's, as C++ mangles it."""

    name: str
    source: str
    function: str

    def key(self, arch: str) -> str:
        parts = (self.name, arch, *_FLAGS, self.source)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def opened(self, arch: str) -> Function:
        """The kernel for an architecture, compiled where it is not cached.

        Raises:
            BuildError: a GPU that is too old, no NVRTC, no place to write, or NVRTC failed.
        """
        check_served(arch)
        return Function(build(self, arch).read_bytes(), self.function, arch)


def build(kernel: GeneratedKernel, arch: str) -> Path:
    """The path of a cubin, compiling it when it is not cached."""
    file, folder = f"{kernel.name}.cubin", f"{kernel.name}-{arch}-{kernel.key(arch)}"
    if known := cached(folder, None, file):
        return known
    library = _nvrtc()

    def make(private: Path) -> None:
        progress.step(f"compile {kernel.name} for {arch}")
        (private / file).write_bytes(_compiled(library, kernel, arch))

    return built(file, f"{folder}-{_version(library)}", f"{kernel.name}-{arch}", make)


def _nvrtc() -> ctypes.CDLL:
    try:
        return nvrtc()
    except OSError as error:
        raise BuildError(f"no NVRTC, which comes with PyTorch for CUDA: {error}") from error


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc{major.value}_{minor.value}"


def _compiled(library: ctypes.CDLL, kernel: GeneratedKernel, arch: str) -> bytes:
    """The cubin.

    Raises:
        BuildError: with NVRTC's first errors.
    """
    program = ctypes.c_void_p()
    text, name = kernel.source.encode(), f"{kernel.name}.cu".encode()
    _succeeded(library, library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        flags = [word.encode() for word in (f"--gpu-architecture={arch}", *_FLAGS)]
        if library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            told = _given(library, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            lines = "\n  ".join(first_errors(told.decode(errors="replace").strip("\0")))
            raise BuildError(f"NVRTC could not compile {kernel.name} for {arch}: {lines}")
        return _given(library, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _given(library: ctypes.CDLL, size_of: Asked, get: Asked, program: ctypes.c_void_p) -> bytes:
    """What NVRTC hands out in two calls: how many bytes, and the bytes."""
    size = ctypes.c_size_t()
    _succeeded(library, size_of(program, ctypes.byref(size)))
    memory = ctypes.create_string_buffer(size.value)
    _succeeded(library, get(program, memory))
    return memory.raw


def _succeeded(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of the kind whose value is one int."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Function:
    """A kernel of one struct of parameters that begins with in_turn(); for every GPU of its architecture."""

    def __init__(self, cubin: bytes, name: str, arch: str) -> None:
        self._driver = driver()
        self._cubin = cubin  # the driver may load from it later
        library, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0))
        self._check(self._driver.cuLibraryGetKernel(ctypes.byref(self._kernel), library, name.encode()))
        version = ctypes.c_int()
        self._check(self._driver.cuDriverGetVersion(ctypes.byref(version)))
        early = int(arch.strip("sm_a")) // 10 >= _EARLY[0] and version.value >= _EARLY[1]
        self._attributes = (_Attribute * 1)(_Attribute(_PROGRAMMATIC, 0, 1)) if early else None

    def launch(self, blocks: int, threads: int, shared: int, parameters: bytes, stream: int) -> None:
        """On a stream of the current device.

        Raises:
            RuntimeError: the driver refused.
        """
        memory = ctypes.create_string_buffer(parameters, len(parameters))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        config = _Launch(
            (blocks, 1, 1), (threads, 1, 1), shared, stream, self._attributes, 0 if self._attributes is None else 1
        )
        result = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._kernel, arguments, None)
        if result:
            raise RuntimeError(self._message(result))

    def _check(self, result: int) -> None:
        if result:
            raise BuildError(self._message(result))

    def _message(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(result, ctypes.byref(text))
        return f"CUDA driver: {(text.value or b'an unknown error').decode()}"
