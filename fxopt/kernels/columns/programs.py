"""Index programs in PyTorch: a source's values, and what a program makes of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .plan import REGISTERS, Compare, Instr, Op, PerRow, Source

Bucketize = Callable[[Tensor, int, Instr], Tensor]  # (values, step of the program, its instruction)
_COMPARE: dict[Compare, Callable] = {compare: getattr(operator, compare.name.lower()) for compare in Compare}
_UNARY: dict[Op, Callable] = {
    op: getattr(torch, op.name.lower()) for op in (Op.ABS, Op.FLOOR, Op.CEIL, Op.TRUNC, Op.SQRT)
}
_BINARY: dict[Op, Callable] = {
    op: getattr(torch, op.name.lower())
    for op in (Op.ADD, Op.MUL, Op.RSUB, Op.DIV, Op.REMAINDER, Op.FMOD, Op.FLOOR_DIVIDE, Op.CLAMP_MIN, Op.CLAMP_MAX)
} | {
    Op.AND: operator.and_,
    Op.OR: operator.or_,
    Op.XOR: operator.xor,
    Op.LSHIFT: operator.lshift,
    Op.RSHIFT: operator.rshift,
}


def source_rows(shape: Sequence[int], source: Source) -> int:
    rows = shape[source.rows[0]]
    return rows * shape[source.rows[1]] if len(source.rows) == 2 else rows


def read(tensors: Sequence[Tensor], source: Source, rows: int) -> Tensor:
    """The source as [rows, lanes]."""
    t = tensors[source.tensor]
    order = list(source.rows)
    if source.lane is not None:
        length = t.shape[source.lane] - source.start if source.length is None else source.length
        t = t.narrow(source.lane, source.start, length)
        order.append(source.lane)
    fixed = {dim: 0 for dim in range(t.dim()) if dim not in order} | dict(source.fixed)
    t = t.permute([*fixed, *order])
    for index in fixed.values():
        t = t[index]
    lanes = t.shape[-1] if source.lane is not None else 1
    n_rows = source_rows(tensors[source.tensor].shape, source) if source.rows else 1
    t = t.reshape(n_rows, lanes)
    return t if source.rows else t.expand(rows, lanes)


def evaluate(
    tensors: Sequence[Tensor], program: Sequence[Instr], source: Source, v: Tensor, bucketize: Bucketize | None = None
) -> tuple[Tensor, Tensor | None]:
    """Runs a program on [rows, lanes] values: (values, which lanes its KEEPs keep or None for all).

    `bucketize` takes over where boundaries differ by row.
    """
    saved, kept = [v] * REGISTERS, None
    for step, instr in enumerate(program):
        if instr.op == Op.SAVE:
            saved[int(instr.b)] = v
        elif instr.op == Op.SWAP:
            v, saved[int(instr.b)] = saved[int(instr.b)], v
        elif instr.op == Op.KEEP:
            holds = _COMPARE[instr.compare](v, instr.a)
            kept = holds if kept is None else kept & holds
        elif instr.op == Op.BUCKETIZE and bucketize:
            v = bucketize(v, step, instr)
        elif instr.op == Op.BUCKETIZE:
            boundaries = tensors[instr.tensor]
            v = torch.bucketize(v.contiguous(), boundaries, right=bool(instr.a), out_int32=instr.dtype == "int32")
        else:
            v = v.to(getattr(torch, instr.dtype))
            if instr.op == Op.WHERE:
                v = v.masked_fill(_COMPARE[instr.compare](saved[0], instr.a), instr.b)
            elif instr.op == Op.COMBINE:
                v = _BINARY[Op(instr.a)](v, saved[int(instr.b)].to(v.dtype))  # type: ignore[arg-type]
            elif instr.op == Op.ADD_TENSOR:
                v = v + _per_lane(tensors, instr.tensor, source).to(v.dtype)
            elif instr.op in _UNARY:
                v = _UNARY[instr.op](v)
            elif instr.op != Op.CAST:
                v = _BINARY[instr.op](v, instr.a)
            v = v.to(getattr(torch, instr.dtype))
    return v, kept


def per_row(tensors: Sequence[Tensor], value: PerRow, rows: int, kept: Tensor | None = None) -> Tensor:
    """[rows, 1]; `kept` [rows, L] tells the lanes that count."""
    if value.source is None:
        assert kept is not None
        return evaluate(tensors, value.program, Source(-1), kept.sum(1, keepdim=True))[0]
    return evaluate(tensors, value.program, value.source, read(tensors, value.source, rows))[0]


def _per_lane(tensors: Sequence[Tensor], index: int, source: Source) -> Tensor:
    t = tensors[index]
    if source.lane is not None:
        return t
    outer = tensors[source.tensor].shape[source.rows[0]]
    return t.expand(outer, t.shape[0]).reshape(-1, 1)
