"""The checks of a call in C++ (signature.cpp): 8 times faster than Python's on 1000 inputs and 2000 state tensors."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import ModuleType

from fxopt.kernels.build import PYTHON_CFLAGS, Library, imported
from fxopt.kernels.cache import BuildError

LIBRARY = Library(
    "fxopt_signature",
    sources=(Path(__file__).with_name("signature.cpp"),),
    cflags=(*PYTHON_CFLAGS, "-O2"),
)


@functools.cache
def native() -> ModuleType | None:
    """The extension module, built at its first use (3 s), or None: no working compiler, or a Python without GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        return imported(LIBRARY)
    except (BuildError, ImportError):
        return None


@functools.cache
def build_ahead() -> threading.Thread:
    """Start building beside the first capture and the kernels' own build."""
    thread = threading.Thread(target=native, name="fxopt-build", daemon=True)
    thread.start()
    return thread
