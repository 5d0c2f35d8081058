"""A Plan as one int64 tensor, which the C++ kernel reads in place on every call, and back.

The tensor holds little-endian records: layout.h overlays structs on it, so nothing is decoded per call.
Names and `runtime_error` are left out: only error messages need them, and Python has the Plan.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .plan import Column, Compare, Instr, Offsets, Op, PerRow, Plan, Source

VERSION = 0x46584F50_0002  # "FXOP", layout 2: layout.h checks it
TILE_COLUMNS = 16  # light columns of one work item: 8-64 wide each, they fill whole cache lines of an output row
DTYPES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5,
    "float32": 6, "float64": 7, "bool": 11, "bfloat16": 15,
}  # fmt: skip
POOLS = ("none", "sum", "mean", "max")
MASKED = ("scaled", "filled", "lowered")
FLAGS = (
    "empty_nan", "wrap_negative", "add", "padding", "bag", "masked", "frozen", "counted", "shared_grad",
)  # fmt: skip

# One format per struct of layout.h. Every record is a multiple of 8 bytes.
HEADER = "<8q"
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
_NAMES = {code: name for name, code in DTYPES.items()}

_known: dict[int, Plan | None] = {}  # number of words -> its plan; None where two plans share a length
_decoded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def encode(plan: Plan) -> torch.Tensor:
    """The plan as an int64 tensor on the CPU. Treat it as immutable.

    Its length identifies the plan in this process, so that operators under fake tensors, which have sizes
    but no data, still know it (:func:`plan_of`).
    """
    _check(plan)
    records: dict[str, list[bytes]] = {name: [] for name in FORMATS}
    order, tiles = _tiles(plan)
    programs: dict[str, int] = {}
    for index in order:
        _add_column(records, programs, index, plan.columns[index])
    measured: dict[int, int] = {}
    for at, index in enumerate(order):
        if _has_rows(plan, index):
            measured.setdefault(plan.columns[index].output, at)
    for output, (width, dtype) in enumerate(zip(plan.widths, plan.dtypes, strict=True)):
        if output not in measured:
            raise ValueError(f"plan: no column of output {output} tells its number of rows")
        record = (-1 if width is None else width, DTYPES[dtype], measured[output], 0, 0)
        records["outputs"].append(struct.pack(FORMATS["outputs"], *record))
    records["tiles"] = [struct.pack(FORMATS["tiles"], *tile) for tile in tiles]
    body = b"".join(b"".join(records[name]) for name in FORMATS)
    data = struct.pack(HEADER, VERSION, *(len(records[name]) for name in FORMATS), 0) + body
    words = _unique_length(len(data) // 8, zlib.crc32(data), plan)
    tensor = torch.frombuffer(bytearray(data.ljust(words * 8, b"\0")), dtype=torch.int64).clone()
    _decoded[tensor] = plan
    return tensor


def plan_of(tensor: torch.Tensor) -> Plan:
    """The plan of an encoded tensor, real or fake.

    Raises:
        ValueError: not an encoded plan, or a fake tensor of a plan this process never saw.
    """
    plan = _decoded.get(tensor)
    if plan is not None:
        return plan
    if type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        plan = decode(tensor)
        _remember(tensor.numel(), plan)
        _decoded[tensor] = plan
        return plan
    words = tensor.shape[0]
    known = _known.get(words if isinstance(words, int) else words.node.hint)
    if known is None:
        raise ValueError(f"fxopt.columns: no plan of {words} words is known here; call plan_of() on the real tensor")
    return known


def known_plan(words: int) -> Plan | None:
    """The plan whose encoding has this many words in this process."""
    return _known.get(words)


def decode(tensor: torch.Tensor) -> Plan:
    """The Plan in an encoded tensor, without names."""
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.numel() < struct.calcsize(HEADER) // 8:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"fxopt.columns: expected an encoded plan (int64, 1-D), found {found}")
    data = tensor.contiguous().numpy().tobytes()
    version, *counts, _ = struct.unpack_from(HEADER, data)
    if version != VERSION:
        raise ValueError(f"fxopt.columns: expected plan version {VERSION:#x}, found {version:#x}")
    records, at = {}, struct.calcsize(HEADER)
    for name, count in zip(FORMATS, counts, strict=True):
        size = struct.calcsize(FORMATS[name])
        records[name] = [struct.unpack_from(FORMATS[name], data, at + i * size) for i in range(count)]
        at += count * size
    columns = dict(_read_column(records, record) for record in records["columns"])
    outputs = records["outputs"]
    return Plan(
        columns=tuple(columns[i] for i in range(len(columns))),
        widths=tuple(None if record[0] < 0 else record[0] for record in outputs),
        dtypes=tuple(_NAMES[record[1]] for record in outputs),
    )


def _check(plan: Plan) -> None:
    written = set()
    for i, column in enumerate(plan.columns):
        slot = (column.output, column.offset)
        if column.add and slot not in written:
            raise ValueError(f"plan: column {i} adds to output {slot[0]} at {slot[1]}, which no earlier column wrote")
        if column.table is None and (column.pool != "none" or column.bag or column.weights):
            raise ValueError(f"plan: column {i} copies values, so it cannot pool them")
        if column.weights and column.pool not in ("sum", "mean"):
            raise ValueError(f"plan: column {i} has weights, which pool {column.pool!r} does not take")
        if column.bag and (column.pool == "none" or column.source.lane is not None or column.source.rows != (0,)):
            raise ValueError(f"plan: column {i}: a bag pools a 1-D source (rows=(0,), no lane)")
        if column.is_masked:
            _check_masked(i, column)
        if column.frozen is not None and column.bag:
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


def _has_rows(plan: Plan, index: int) -> bool:
    return bool(plan.columns[index].bag or plan.columns[index].source.rows)


def _tiles(plan: Plan) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """The order of columns in the tensor, and work items (output, first, count, heavy): heavy ones first.

    Columns that write one slot (`add`) stay in one tile, in plan order: a tile runs in one thread.
    """
    slots: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, column in enumerate(plan.columns):
        slots[column.output, column.offset].append(i)
    heavy, light = [], defaultdict(list)
    for (output, _), members in slots.items():
        if any(plan.columns[i].bag or plan.columns[i].source.lane is not None for i in members):
            heavy.append((output, members))
        else:
            light[output].append(members)
    groups = [(output, members, 1) for output, members in heavy]
    for output, parts in light.items():
        for at in range(0, len(parts), TILE_COLUMNS):
            groups.append((output, [i for part in parts[at : at + TILE_COLUMNS] for i in part], 0))
    order: list[int] = []
    tiles = []
    for output, members, is_heavy in groups:
        tiles.append((output, len(order), len(members), is_heavy))
        order += members
    return order, tiles


def _add_column(records: dict[str, list[bytes]], programs: dict[str, int], index: int, column: Column) -> None:
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


def _program(records: dict[str, list[bytes]], programs: dict[str, int], program: tuple[Instr, ...]) -> tuple[int, int]:
    """Where its instructions are, and how many; equal programs are stored once."""
    key = repr(program)  # tells 1 from 1.0 and 0.0 from -0.0
    if key not in programs:
        programs[key] = len(records["instrs"])
        records["instrs"] += [_pack_instr(instr) for instr in program]
    return programs[key], len(program)


def _extra(records: dict[str, list[bytes]], programs: dict[str, int], column: Column) -> int:
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


def _source(records: dict[str, list[bytes]], source: Source | None) -> tuple[int, ...]:
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


def _read_column(records: dict, record: tuple[int, ...]) -> tuple[int, Column]:
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
    if instr.op in (Op.REMAINDER, Op.FMOD, Op.FLOOR_DIVIDE) and instr.a == 0:
        raise ValueError(f"plan: {instr.op.name} by zero")
    kinds = isinstance(instr.a, float) | isinstance(instr.b, float) << 1
    a, b = _bits(instr.a), _bits(instr.b)
    return struct.pack(FORMATS["instrs"], instr.op, DTYPES[instr.dtype], instr.compare, kinds, instr.tensor, a, b)


def _read_instr(record: tuple[int, ...]) -> Instr:
    op, dtype, compare, kinds, tensor, a, b = record
    return Instr(Op(op), _NAMES[dtype], _number(a, kinds & 1), _number(b, kinds & 2), tensor, Compare(compare))


def _bits(value: int | float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else int(value)


def _number(bits: int, is_float: int) -> int | float:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if is_float else bits


def _unique_length(words: int, checksum: int, plan: Plan) -> int:
    """Pads by the content, so that lengths differ across processes too, and on until it is free here."""
    words += checksum % 61
    while words in _known and not _same(_known[words], plan):
        words += 1
    _known[words] = plan
    return words


def _remember(words: int, plan: Plan) -> None:
    if not _same(_known.setdefault(words, plan), plan):
        _known[words] = None


def _same(known: Plan | None, plan: Plan) -> bool:
    return known is not None and (known == plan or _unnamed(known) == _unnamed(plan))


def _unnamed(plan: Plan) -> Plan:
    """As :func:`decode` gives it: without what only error messages need."""
    columns = (replace(c, name="", table_name="", runtime_error=False) for c in plan.columns)
    return replace(plan, columns=tuple(columns))
