"""What a plan must hold, before it is encoded."""

from __future__ import annotations

import math

from .plan import Column, Op, Plan


def check(plan: Plan) -> None:
    written = set()
    for i, column in enumerate(plan.columns):
        slot = (column.output, column.offset)
        if column.add and slot not in written:
            raise ValueError(f"plan: column {i} adds to output {slot[0]} at {slot[1]}, which no earlier column wrote")
        if column.table is None and (column.pool != "none" or column.bag or column.weights):
            raise ValueError(f"plan: column {i} copies values, so it cannot pool them")
        if column.weights and column.pool not in ("sum", "mean"):
            raise ValueError(f"plan: column {i} has weights, which pool {column.pool!r} does not take")
        if column.bag and (column.source.lane is not None or column.source.rows != (0,)):
            raise ValueError(f"plan: column {i}: bags are those of a 1-D source (rows=(0,), no lane)")
        if column.is_masked:
            _check_masked(i, column)
        if column.frozen is not None and column.bag and column.pool != "none":
            raise ValueError(f"plan: column {i} is a bag, which leaves padding out instead of freezing it")
        if column.divisor and column.divisor.source is None and not column.is_masked:
            raise ValueError(f"plan: column {i} divides by the number of lanes that count, and none are masked")
        for value in filter(None, (column.lengths, column.divisor)):
            if any(instr.op in (Op.KEEP, Op.ADD_TENSOR) for instr in value.program):
                raise ValueError(f"plan: column {i}: KEEP and ADD_TENSOR are for lanes, not for one value a row")
        written.add(slot)


def _check_masked(i: int, column: Column) -> None:
    if column.table is None or column.bag or column.pool == "none" or column.weights or column.padding is not None:
        raise ValueError(f"plan: column {i} is masked: expected dense pooling without weights and padding")
    if column.lengths and column.lengths.source is None:
        raise ValueError(f"plan: column {i} has lengths without a source")
    allowed = ("filled", "lowered") if column.pool == "max" else ("scaled", "filled")
    value = column.masked_value
    fits = {"scaled": value == 0, "filled": column.pool == "max" or value == 0, "lowered": math.isfinite(value)}
    if column.masked not in allowed or not fits[column.masked]:
        raise ValueError(f"plan: column {i}, {column.pool}: masked lanes are {column.masked!r} by {value}")
