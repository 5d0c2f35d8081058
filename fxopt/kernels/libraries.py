"""Every library of kernels, for those who compile ahead: all that the modules of this package define."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import torch
from torch._ops import OpOverload

from .build import Library
from .cuda_build import CudaLibrary
from .shims import Call


def _defined() -> list[object]:
    """The values of all modules here, each once."""
    names = (found.name for found in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."))
    modules = [importlib.import_module(name) for name in names if name != __name__]
    return list({id(value): value for module in modules for value in vars(module).values()}.values())


def _size(library: Library | CudaLibrary) -> int:
    """Characters to read: what has most takes longest to compile."""
    return sum(map(len, library.files.values()))


_found = sorted((each for each in _defined() if isinstance(each, Library | CudaLibrary)), key=_size, reverse=True)
CUDA_LIBRARIES = tuple(library for library in _found if isinstance(library, CudaLibrary))
BESIDE_CUDA = tuple(library for library in _found if isinstance(library, Library) and library.beside_cuda)
LIBRARIES = tuple(library for library in _found if isinstance(library, Library) and not library.beside_cuda)


def c_shims() -> dict[OpOverload, list[str]]:
    """Declarations of what AOTInductor calls in the place of operators: those that this process has defined. A program
    for CUDA calls no others than have a kernel in C++ there (:func:`.operators.definitions_on`)."""
    calls = [Call(schema) for library in LIBRARIES for schema in library.schemas]
    packets = ((getattr(torch.ops.fxopt, call.name, None), call) for call in calls)
    return {packet.default: [call.shim("cpu"), call.shim("cuda")] for packet, call in packets if packet is not None}
