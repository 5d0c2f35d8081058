"""An id tensor as data: an elementwise program over a strided view of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.constants import Number
from fxopt.shape.sizes import shape_of
from fxopt.shape.views import View


@dataclass(frozen=True)
class Step:
    """One instruction, and the tensor node it reads (bucketize's boundaries, per-field offsets)."""

    instr: Instr
    operand: Node | None = None


@dataclass(frozen=True)
class IndexValue:
    """program(view of base): an elementwise program over a strided view of a tensor node."""

    base: Node
    view: View
    program: tuple[Step, ...] = ()

    @property
    def reads(self) -> list[Node]:
        return [self.base, *(step.operand for step in self.program if step.operand is not None)]

    @property
    def per_lane(self) -> bool:
        """Whether a step depends on the position along the last axis, which must then stay as it is."""
        return any(step.instr.op is Op.ADD_TENSOR for step in self.program)


def itself(node: Node, program: tuple[Step, ...] = ()) -> IndexValue:
    """The program over a tensor node as a whole."""
    return IndexValue(node, View.of(shape_of(node)), program)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operand(dtype: torch.dtype, value: Number) -> Number | None:
    """A scalar as `dtype` holds it; None where torch would promote, overflow or refuse instead."""
    if dtype.is_floating_point:
        return float(value) if dtype in (torch.float32, torch.float64) else None
    if dtype == torch.bool or value != value or int(value) != value:
        return None
    limits = torch.iinfo(dtype)
    return int(value) if limits.min <= value <= limits.max else None
