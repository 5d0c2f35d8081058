"""The records of an encoded plan: layout.h overlays structs on them, little-endian and each a multiple of 8 bytes."""

from __future__ import annotations

import struct
from typing import Any

from ..words import bits_of, float_of
from .plan import Column, Compare, Instr, Offsets, Op, PerRow, Source

DTYPES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5,
    "float32": 6, "float64": 7, "bool": 11, "bfloat16": 15,
}  # fmt: skip
POOLS = ("none", "sum", "mean", "max")
MASKED = ("scaled", "filled", "lowered")
_BITS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32}
FLAGS = (
    "empty_nan", "wrap_negative", "add", "padding", "bag", "masked", "frozen", "counted", "shared_grad",
)  # fmt: skip

# One format per struct of layout.h.
SOURCE = "i4b3q"
FORMATS = {
    "columns": f"<{SOURCE}2iq2i2bhi2q",
    "extras": f"<{SOURCE}{SOURCE}{SOURCE}8iqd",
    "instrs": "<4Bi2q",
    "fixed": "<2q",
    "outputs": "<q4i",
    "tiles": "<4i",
}
_NO_SOURCE = (-1, 0, 0, 0, 0, 0, 0, 0)
NAMES = {code: name for name, code in DTYPES.items()}

Records = dict[str, list[bytes]]  # of each format, packed


def add_column(records: Records, programs: dict[str, int], index: int, column: Column) -> None:
    flags = {
        "empty_nan": column.empty_nan,
        "wrap_negative": column.wrap_negative,
        "add": column.add,
        "padding": column.padding is not None,
        "bag": column.bag is not None,
        "masked": column.is_masked,
        "frozen": column.frozen is not None,
        "counted": column.divisor is not None and column.divisor.source is None,
        "shared_grad": column.shared_grad,
    }
    record = (
        *_source(records, column.source),
        *(-1 if column.table is None else column.table, column.output, column.offset),
        *_program(records, programs, column.program),
        *(POOLS.index(column.pool), MASKED.index(column.masked), sum(flags[f] << k for k, f in enumerate(FLAGS))),
        *(index, column.padding or 0, _extra(records, programs, column)),
    )
    records["columns"].append(struct.pack(FORMATS["columns"], *record))


def _program(records: Records, programs: dict[str, int], program: tuple[Instr, ...]) -> tuple[int, int]:
    """Where its instructions are, and how many; equal programs are stored once."""
    key = repr(program)  # tells 1 from 1.0 and 0.0 from -0.0
    if key not in programs:
        programs[key] = len(records["instrs"])
        records["instrs"] += [_pack_instr(instr) for instr in program]
    return programs[key], len(program)


def _extra(records: Records, programs: dict[str, int], column: Column) -> int:
    """The number of the record with what few columns have; -1 where it has none of it."""
    divisor, lengths = column.divisor or PerRow(None), column.lengths or PerRow(None)
    rare = (column.bag, column.weights, column.divisor, column.lengths, column.frozen)
    if all(part is None for part in rare) and not column.is_masked:
        return -1
    bag = column.bag or Offsets(-1)
    record = (
        *(number for part in (column.weights, divisor.source, lengths.source) for number in _source(records, part)),
        *(bag.tensor, bag.include_last, bag.segment, bag.segments),
        *_program(records, programs, divisor.program),
        *_program(records, programs, lengths.program),
        *(column.frozen or 0, column.masked_value),
    )
    records["extras"].append(struct.pack(FORMATS["extras"], *record))
    return len(records["extras"]) - 1


def _source(records: Records, source: Source | None) -> tuple[int, ...]:
    if source is None:
        return _NO_SOURCE
    at = len(records["fixed"])
    records["fixed"] += [struct.pack(FORMATS["fixed"], dim, index) for dim, index in source.fixed]
    row0, row1 = (*source.rows, -1, -1)[:2]
    lane = -1 if source.lane is None else source.lane
    length = -1 if source.length is None else source.length
    return source.tensor, row0, row1, lane, len(source.fixed), source.start, length, at


def _read_source(records: dict, record: tuple[int, ...]) -> Source:
    tensor, row0, row1, lane, n_fixed, start, length, at = record
    return Source(
        tensor,
        rows=tuple(dim for dim in (row0, row1) if dim >= 0),
        lane=None if lane < 0 else lane,
        start=start,
        length=None if length < 0 else length,
        fixed=tuple(records["fixed"][at : at + n_fixed]),
    )


def _read_program(records: dict, at: int, steps: int) -> tuple[Instr, ...]:
    return tuple(_read_instr(record) for record in records["instrs"][at : at + steps])


def read_column(records: dict, record: tuple[int, ...]) -> tuple[int, Column]:
    table, output, offset, at, steps, pool, masked, bits, index, padding, extra = record[8:]
    flags = {name: bool(bits >> k & 1) for k, name in enumerate(FLAGS)}
    return index, Column(
        source=_read_source(records, record[:8]),
        table=None if table < 0 else table,
        output=output,
        offset=offset,
        program=_read_program(records, at, steps),
        pool=POOLS[pool],
        masked=MASKED[masked],
        padding=padding if flags["padding"] else None,
        shared_grad=flags["shared_grad"],
        empty_nan=flags["empty_nan"],
        wrap_negative=flags["wrap_negative"],
        add=flags["add"],
        **({} if extra < 0 else _read_extra(records, records["extras"][extra], flags)),
    )


def _read_extra(records: dict, record: tuple, flags: dict[str, bool]) -> dict[str, Any]:
    sources = record[:8], record[8:16], record[16:24]
    weights, divisor, lengths = (_read_source(records, s) if s[0] >= 0 else None for s in sources)
    bag, include_last, segment, segments, divide_at, divide_steps, length_at, length_steps, frozen, value = record[24:]
    divided = PerRow(divisor, _read_program(records, divide_at, divide_steps))
    return {
        "weights": weights,
        "divisor": divided if divisor or flags["counted"] else None,
        "lengths": PerRow(lengths, _read_program(records, length_at, length_steps)) if lengths else None,
        "bag": Offsets(bag, bool(include_last), segment, segments) if flags["bag"] else None,
        "frozen": frozen if flags["frozen"] else None,
        "masked_value": value,
    }


def _pack_instr(instr: Instr) -> bytes:
    divides = instr.op in (Op.REMAINDER, Op.FMOD, Op.FLOOR_DIVIDE)
    if divides and int(instr.a) % (1 << _BITS.get(instr.dtype, 64)) == 0:  # as it wraps
        raise ValueError(f"plan: {instr.op.name} by zero")
    kinds = isinstance(instr.a, float) | isinstance(instr.b, float) << 1
    a, b = _bits(instr.a), _bits(instr.b)
    return struct.pack(FORMATS["instrs"], instr.op, DTYPES[instr.dtype], instr.compare, kinds, instr.tensor, a, b)


def _read_instr(record: tuple[int, ...]) -> Instr:
    op, dtype, compare, kinds, tensor, a, b = record
    return Instr(Op(op), NAMES[dtype], _number(a, kinds & 1), _number(b, kinds & 2), tensor, Compare(compare))


def _bits(value: int | float) -> int:
    return bits_of(value) if isinstance(value, float) else int(value)


def _number(bits: int, is_float: int) -> int | float:
    return float_of(bits) if is_float else bits
