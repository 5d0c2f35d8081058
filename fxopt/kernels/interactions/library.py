"""The library of the interaction kernels: compiled on first use, PyTorch's own operators where it cannot be."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .. import entry, simd
from ..build import BuildError, Library

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_interactions",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), *simd.HEADERS, *entry.HEADERS),
    cflags=(*simd.CFLAGS, entry.STABLE_ABI),
)
_loading = threading.Lock()


def load() -> None:
    """Defines the operators, once."""
    with _loading:
        _define()


@functools.cache
def _define() -> torch.library.Library:
    from . import attention, dot, pair_sum  # the operators read this library's kernels

    lib = torch.library.Library("fxopt", "FRAGMENT")
    for operator in (attention, dot, pair_sum):
        for schema in operator.SCHEMAS:
            lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        operator.define(lib)
    return lib


@functools.cache
def kernel(name: str) -> Callable:
    """The way past the dispatcher to an operator's kernel; where there is none, a function that answers None."""
    load()
    try:
        return entry.load(KERNEL, f"fxopt_{name}_run") or _no_way
    except (BuildError, OSError) as error:
        _warn(str(error))
        return _no_way


def _no_way(*arguments: object) -> None:
    return None


@functools.cache
def _warn(error: str) -> None:
    warnings.warn(f"fxopt: interactions run in PyTorch, without the compiled kernel: {error}", stacklevel=5)
