"""fxopt::columns: all embedding columns of a model in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxopt.facts import Facts
from fxopt.locks import lock

from .. import entry
from ..cache import BuildError
from ..operators import Operator, Operators, cpu_library
from . import autograd, cuda, grouped, jagged, recorder, reference
from .cuda import backward as cuda_backward
from .cuda import offsets as cuda_offsets
from .encode import clamps, decides, ending_with_last, plan_of
from .plan import Plan

_VECTORIZED = ("-ftree-vectorize", "-fvect-cost-model=dynamic")  # as fast as -O3 here, and a third less to compile
_INPUTS = "Tensor[] tensors, Tensor[] tables, Tensor plan"
_SCHEMA = f"columns({_INPUTS}) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "call.h", "tile.h", (_SCHEMA, jagged.SCHEMA), _VECTORIZED)
_loading = lock()
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
    outputs = OPERATORS.past_dispatcher("columns")(tensors, tables, plan)
    if outputs is not None:
        return outputs
    tensors, tables = list(tensors), list(tables)
    if torch.is_grad_enabled():
        outputs = recorder.record(OPERATORS.past_dispatcher("columns"), tensors, tables, plan)
        return outputs or OPERATORS.recorded("columns", tensors, tables, plan, call=columns)
    first = (tables or tensors)[0]
    if first.is_cuda and not load_cuda(first.get_device()):
        return torch.ops.fxopt.columns_in_pytorch(tensors, tables, plan)
    return torch.ops.fxopt.columns(tensors, tables, plan)


def offsets_call_of(exact: bool) -> Callable[[Tensor, Sequence[Tensor], bool], Tensor]:
    """:func:`.jagged.offsets`, past the dispatcher where it can be."""
    return OPERATORS.call_of("jagged_offsets", torch.tensor([exact], dtype=torch.int64, device="cpu"))


def _offsets_on_cuda(lengths: Tensor, ids: list[Tensor], exact: bool) -> Tensor:
    served = cuda_offsets.serves(lengths, ids) and load_cuda(lengths.get_device())
    return (cuda_offsets if served else jagged).offsets(lengths, ids, exact)


def load() -> None:
    """Defines the operator, once: with the compiled kernel, or with grouped PyTorch where it cannot be compiled."""
    OPERATORS.compiled()


def load_cuda(device: int) -> bool:
    """Whether a device has a kernel; it is built and registered when its first CUDA tensors come."""
    load()
    if device not in _cuda:
        with _loading:
            if device not in _cuda:
                _cuda[device] = torch.version.cuda is not None and _load_cuda(device)
    return _cuda[device]


def _load_cuda(device: int) -> bool:
    try:
        address = cuda.load(device)
    except (BuildError, OSError) as error:
        warnings.warn(f"fxopt: embedding columns on CUDA run in PyTorch, without the kernel: {error}", stacklevel=5)
        return False
    if address is None:
        return False
    entry.bind_cuda(OPERATORS.past_dispatcher("columns"), address, device)
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
        rows = _rows(tensors, decoded, output)
        if width is None:
            width = reference.width_of(tensors, tables, decoded, output)
        results.append(torch.empty((rows, width), dtype=getattr(torch, dtype), device=device))
    return results


def _rows(tensors: list[Tensor], plan: Plan, output: int) -> int:
    if any(column.output == output and column.segment for column in plan.columns):
        return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]
    return reference.rows_of(tensors, plan, output)


def _fake_backward(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    return [torch.empty_like(table, memory_format=torch.contiguous_format) for table in tables]


_FORWARD = (_columns_grouped, _fake, autograd.backward, autograd.setup_context)
OPERATORS = Operators(
    (
        Operator(
            _SCHEMA,
            *_FORWARD,
            facts=Facts(looks_up=True, clamps=clamps, decides=decides, padded=ending_with_last),
        ),
        Operator(jagged.SCHEMA, jagged.offsets, jagged.fake, others={"CUDA": _offsets_on_cuda}),
        Operator(f"columns_in_pytorch({_INPUTS}) -> Tensor[]", *_FORWARD),
        Operator(
            f"columns_backward(Tensor[] grads, {_INPUTS}) -> Tensor[]",
            fake=_fake_backward,
            backward=autograd.no_second_derivative,
            others={"CUDA": cuda_backward.backward},
        ),
        Operator(
            f"columns_row_gradients(Tensor[] grads, {_INPUTS}) -> Tensor[]",
            others={"CUDA": cuda_backward.row_gradients},
        ),
        Operator(f"columns_entries(Tensor[] grads, {_INPUTS}) -> Tensor[]"),  # these two have a kernel on CUDA alone
        Operator(f"columns_dots({_INPUTS}, Tensor[] rest, int width) -> Tensor"),
    ),
    KERNEL,
)
