"""fxopt::columns: all embedding columns of a model in one call."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fxopt.facts import Facts
from fxopt.locks import lock
from fxopt.torch_internals.python_tensor import PYTHON_CALL, readable

from .. import entry, simd
from ..build import BuildError, Library, build
from ..operators import Operator, defined
from . import autograd, cuda, grouped, reference
from .cuda import backward as cuda_backward
from .encode import clamps, ending_with_last, plan_of

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_columns",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), *simd.HEADERS, *entry.HEADERS),
    cflags=(
        *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"),  # as fast as -O3 here, and a third less to compile
        "-ffp-contract=off",  # a program's float steps round one by one; an FMA is only where the source says so
        *("-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", entry.STABLE_ABI),
    ),
)
ENTRY = Library(
    "fxopt_columns_entry",
    sources=(_HERE / "entry.cpp",),
    headers=(_HERE / "entry.h", _HERE / "layout.h", _HERE.parent / "refused.h", *PYTHON_CALL),
    cflags=("-O1", f"-I{sysconfig.get_path('include')}", f"-DFXOPT_PYTHON={sys.version_info.minor}"),
)
_INPUTS = "Tensor[] tensors, Tensor[] tables, Tensor plan"
_loading = lock()
_library: torch.library.Library | None = None
_entry: Callable | None = None
_cuda: dict[int, bool] = {}  # by device: whether it has a kernel, or nothing while nobody asked


def columns(tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor) -> list[Tensor]:
    """Every output of an encoded plan, each contiguous [rows, width].

    Args:
        tensors: ids, values, offsets, boundaries, weights, as the plan numbers them.
        tables: [R, D] each, float16, bfloat16, float32 or float64; or of :func:`~.quantized.quantized`.
        plan: int64, 1-D, from :func:`~.encode.encode`; on the CPU on every device.

    Raises:
        RuntimeError: inputs that do not fit the plan; an id outside its table (:func:`.errors.explain`).
    """
    load()
    if _entry is not None:
        outputs = _entry(tensors, tables, plan)
        if outputs is not None:
            return outputs
    first = (tables or tensors)[0]
    if first.is_cuda and not load_cuda(first.get_device()):
        return torch.ops.fxopt.columns_in_pytorch(tensors, tables, plan)
    return torch.ops.fxopt.columns(tensors, tables, plan)


def load() -> None:
    """Defines the operator, once: with the compiled kernel, or with grouped PyTorch where it cannot be compiled."""
    global _library, _entry
    if _library is not None:
        return
    with _loading:
        if _library is None:
            library = defined(_define)
            _entry = _load_kernel()
            _library = library


def _define(library: torch.library.Library) -> None:
    for operator in _operators():
        operator.define(library)


def _operators() -> tuple[Operator, ...]:
    forward = (_columns_grouped, _fake, autograd.backward, autograd.setup_context)
    facts = Facts(looks_up=True, clamps=clamps, padded=ending_with_last)
    no_second_derivative = autograd.no_second_derivative
    return (
        Operator(f"columns({_INPUTS}) -> Tensor[]", *forward, facts=facts),
        Operator(f"columns_in_pytorch({_INPUTS}) -> Tensor[]", *forward),
        Operator(
            f"columns_backward(Tensor[] grads, {_INPUTS}) -> Tensor[]", None, _fake_backward, no_second_derivative
        ),
        Operator(f"columns_row_gradients(Tensor[] grads, {_INPUTS}) -> Tensor[]"),
    )


def _load_kernel() -> Callable | None:
    """Registers the compiled kernel and gives its entry from Python; None when there is no compiler."""
    try:
        with ThreadPoolExecutor(2) as pool:  # two compilers side by side when both libraries are cold
            kernel, way_in = pool.map(build, (KERNEL, ENTRY))
        torch.ops.load_library(kernel)
        spec = importlib.util.spec_from_file_location(ENTRY.name, way_in)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.bind(ctypes.cast(ctypes.CDLL(str(kernel)).fxopt_columns_run, ctypes.c_void_p).value)
    except (BuildError, OSError, ImportError) as error:
        warnings.warn(f"fxopt: embedding columns run in PyTorch, without the compiled kernel: {error}", stacklevel=4)
        return None
    return module.call if readable(module) else None


def load_cuda(device: int) -> bool:
    """Whether a device has a kernel; it is built and registered when its first CUDA tensors come."""
    load()
    if device not in _cuda:
        with _loading:
            if device not in _cuda:
                _cuda[device] = torch.version.cuda is not None and _load_cuda(device)
    return _cuda[device]


def _load_cuda(device: int) -> bool:
    first = not any(_cuda.values())
    try:
        address = cuda.load(device)
    except (BuildError, OSError) as error:
        warnings.warn(f"fxopt: embedding columns on CUDA run in PyTorch, without the kernel: {error}", stacklevel=5)
        return False
    if address is None:
        return False
    if _entry is not None:
        _entry.__self__.bind_cuda(address, device)  # type: ignore[attr-defined]
    if _library is not None and first:
        _library.impl("columns_backward", cuda_backward.backward, "CUDA")
        _library.impl("columns_row_gradients", cuda_backward.row_gradients, "CUDA")
    return True


def _columns_grouped(tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    first = (tables or tensors)[0]
    if first.is_cuda and load_cuda(first.get_device()):
        return torch.ops.fxopt.columns(tensors, tables, plan)  # to the kernel that is there now
    return grouped.columns(tensors, tables, plan_of(plan))


def _fake(tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    decoded = plan_of(plan)
    device = tables[0].device if tables else tensors[0].device
    results = []
    for output, (width, dtype) in enumerate(zip(decoded.widths, decoded.dtypes, strict=True)):
        rows = reference.rows_of(tensors, decoded, output)
        if width is None:
            width = reference.width_of(tensors, tables, decoded, output)
        results.append(torch.empty((rows, width), dtype=getattr(torch, dtype), device=device))
    return results


def _fake_backward(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    return [torch.empty_like(table, memory_format=torch.contiguous_format) for table in tables]
