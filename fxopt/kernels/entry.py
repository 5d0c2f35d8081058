"""Kernels of ours from Python: registered with the dispatcher, and a way past it, which costs 1 us."""

from __future__ import annotations

import ctypes
import functools
import warnings
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import BuiltinFunctionType, ModuleType

import torch

from fxopt import progress

from .build import PYTHON_CFLAGS, Library, build, imported
from .cache import BuildError

_HERE = Path(__file__).parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11
ENTRY = Library(
    "fxopt_entry",
    sources=(_HERE / "entry.cpp",),
    cflags=(*PYTHON_CFLAGS, "-O2"),
)


def register(kernel: Library) -> Path:
    """Registers a kernel library's operators with the dispatcher, and gives its file.

    Raises:
        BuildError, OSError: there is no kernel: no compiler, or it failed.
    """
    with ThreadPoolExecutor(2) as pool:  # two compilers side by side when both libraries are cold
        entry, path = pool.submit(progress.heard(_entry)), pool.submit(progress.heard(build), kernel)
        torch.ops.load_library(path.result())
        entry.result()
    return path.result()


def bind(kernel: Path, run: str) -> Callable | None:
    """The way past the dispatcher to the function `run` of a library; None where this torch's tensors cannot be read.

    It takes the operator's tensors, lists of tensors, and as its last argument the plan (int64, 1-D), and returns a
    list of tensors, or None: the dispatcher has to be asked.
    """
    module = _entry()
    if module is None:
        return None
    return module.bind(ctypes.cast(getattr(ctypes.CDLL(str(kernel)), run), ctypes.c_void_p).value)


def bind_cuda(way: Callable, address: int, device: int) -> None:
    """From now on a way of :func:`bind` takes tensors on a CUDA device, too, to the kernel at `address`."""
    module = _entry()
    if module is not None and isinstance(way, BuiltinFunctionType):  # where the CPU has no kernel, there is no way
        module.bind_cuda(way, address, device)


def picker(places: Sequence[int], in_place: bool = False) -> Callable[..., Sequence]:
    """``pick(state, inputs, *others)``: the tuple of those of all of them, in this order, that stand at `places`.

    in_place: a sequence instead that :func:`bind`'s ways read where its items lie. What the check of the state has seen
    of a tensor must still hold.
    """
    module = _entry()
    return module.picker(array("q", places), in_place) if module is not None else functools.partial(_pick, places)


def _pick(places: Sequence[int], state: Sequence, inputs: Sequence, *others: object) -> tuple:
    everything = [*state, *inputs, *others]
    return tuple(everything[place] for place in places)


@functools.cache
def _entry() -> ModuleType | None:
    try:
        return imported(ENTRY)
    except (BuildError, OSError, ImportError) as error:
        warnings.warn(f"fxopt: kernels are called through the dispatcher: {error}", stacklevel=5)
        return None
