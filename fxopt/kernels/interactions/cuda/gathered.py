"""fxopt::gathered_dots: dots of pairs of vectors that a plan's columns look up, read from the tables by one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxopt.facts import Facts

from ... import cuda_build
from ...columns import cuda
from ...columns import op as columns_op
from ...columns.encode import clamps, decides
from ...columns.errors import explain
from ...columns.plan import Plan
from ...operators import Operator, Operators
from . import dot_rows

KERNEL = cuda_build.CudaLibrary("fxopt_gathered_dots", source=Path(__file__).with_name("gathered.cu"), flags=cuda.FLAGS)
_UNFIT = "fxopt-unfit"  # gathered.cu's


def in_two(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int
) -> Tensor:
    """The vectors, then their dots."""
    (flat,) = columns_op.columns(tensors, tables, plan)
    dim = tables[0].shape[1]
    return dot_rows.gpu_dots(flat.view(flat.shape[0], flat.shape[1] // dim, dim), before, i, j, width)


def gathered_dots(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int
) -> Tensor:
    """`fxopt::columns` of (tensors, tables, plan) as vectors z [B, F, D], then gpu_dots(z, before, i, j, width).

    Args:
        plan: of one output, whose columns are F vectors of D numbers: plain lookups, or copies (serves.py).

    Raises:
        RuntimeError: as fxopt::columns.
    """
    if before.is_cuda and _bound(before.get_device()):
        try:
            return torch.ops.fxopt.columns_dots(tensors, tables, plan, [before, i, j], width)
        except RuntimeError as error:
            if _UNFIT not in str(error):
                raise
    return in_two(tensors, tables, plan, before, i, j, width)


def call_of(plan: Plan) -> Callable[..., Tensor]:
    """`gathered_dots` for one plan, with its errors explained."""

    def fxopt_gathered_dots(*arguments: object) -> Tensor:
        try:
            return gathered_dots(*arguments)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise explain(error, plan) or error from None

    return fxopt_gathered_dots


def _fake(
    tensors: list[Tensor], tables: list[Tensor], plan: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int
) -> Tensor:
    return before.new_empty(before.shape[0], width)


@functools.cache
def _bound(device: int) -> bool:
    if not columns_op.load_cuda(device) or cuda_build.loaded(KERNEL, device) is None:
        return False
    cuda.bind_dots(KERNEL, device)
    return True


_INPUTS = "Tensor[] tensors, Tensor[] tables, Tensor plan, Tensor before, Tensor i, Tensor j, int width"
_FACTS = Facts(rows="first", clamps=clamps, decides=decides)
OPERATORS = Operators((Operator(f"gathered_dots({_INPUTS}) -> Tensor", in_two, _fake, facts=_FACTS),), cuda=KERNEL)


def load(device: torch.device) -> None:
    """Defines the operator, and builds its kernel where there is a GPU: ids are counted from the first call on."""
    OPERATORS.load()
    if device.type == "cuda" and torch.cuda.is_available():
        _bound(device.index)
