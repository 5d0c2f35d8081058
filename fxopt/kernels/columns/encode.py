"""A Plan as one int64 tensor, which the C++ kernel reads in place on every call, and back.

It holds a header and records, which the kernel reads as structs: nothing is decoded per call. The names behind them
are for error messages in a process without Python. `runtime_error` is left out, and decoding leaves out the names:
Python has the Plan.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import defaultdict
from dataclasses import replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxopt.config import BAD_IDS
from fxopt.torch_internals.modes import is_functorch_wrapped_tensor, no_dispatch_modes

from .plan import Column, Op, Plan
from .records import DTYPES, FORMATS, NAMES, Records, add_column, read_column

VERSION = 0x46584F50_0002  # "FXOP", layout 2: layout.h checks it
TILE_COLUMNS = 16  # light columns of one work item: 8-64 wide each, they fill whole cache lines of an output row
HEADER = "<8q"  # version, a count per format, the number of bad_ids

# By the number of words the encoding and its plan; None where two plans share a length.
_known: dict[int, tuple[bytes, Plan] | None] = {}
_decoded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def encode(plan: Plan) -> torch.Tensor:
    """The plan as an int64 tensor on the CPU. Treat it as immutable.

    Its length identifies the plan in this process, so that operators under fake tensors, which have sizes
    but no data, still know it (:func:`plan_of`).
    """
    _check(plan)
    records: Records = {name: [] for name in FORMATS}
    order, tiles = _tiles(plan)
    programs: dict[str, int] = {}
    for index in order:
        add_column(records, programs, index, plan.columns[index])
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
    counts = (len(records[name]) for name in FORMATS)
    data = struct.pack(HEADER, VERSION, *counts, BAD_IDS.index(plan.bad_ids)) + body + _names(plan)
    padded = _padded(data)
    _known[len(padded) // 8] = padded, plan
    tensor = torch.frombuffer(bytearray(padded), dtype=torch.int64).clone()
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
    if type(tensor) is torch.Tensor and not is_functorch_wrapped_tensor(tensor):
        with no_dispatch_modes():  # data, whoever looks on
            plan = decode(tensor)
            _remember(tensor, plan)
        _decoded[tensor] = plan
        return plan
    from fxopt.torch_internals.symbols import hint_of  # whoever has a fake tensor has paid for this import

    words = tensor.shape[0]
    known = _known.get(words if isinstance(words, int) else hint_of(words))
    if known is None:
        raise ValueError(f"fxopt.columns: no plan of {words} words is known here; call plan_of() on the real tensor")
    return known[1]


def clamps(encoded: torch.Tensor) -> bool:
    """Whether a call with this plan moves ids outside their table into it, and counts them."""
    return plan_of(encoded).bad_ids == "clamp"


def decides(encoded: torch.Tensor) -> set[int]:
    """The tensors that a call with this plan computes ids from, or integers that are results."""
    columns = [column for column in plan_of(encoded).columns if column.table is not None or column.program]
    return {c.source.tensor for c in columns} | {step.tensor for c in columns for step in c.program}


def ending_with_last(encoded: torch.Tensor) -> torch.Tensor:
    """The plan for offsets with one entry more, the number of ids, where they ended with the ids."""
    plan = plan_of(encoded)
    bags = (c.bag and replace(c.bag, include_last=True) for c in plan.columns)
    return encode(replace(plan, columns=tuple(replace(c, bag=bag) for c, bag in zip(plan.columns, bags, strict=True))))


def known_plan(words: int) -> Plan | None:
    """The plan whose encoding has this many words in this process."""
    known = _known.get(words)
    return None if known is None else known[1]


def decode(tensor: torch.Tensor) -> Plan:
    """The Plan in an encoded tensor, without names."""
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.numel() < struct.calcsize(HEADER) // 8:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"fxopt.columns: expected an encoded plan (int64, 1-D), found {found}")
    data = _bytes(tensor)
    version, *counts, bad_ids = struct.unpack_from(HEADER, data)
    if version != VERSION:
        raise ValueError(f"fxopt.columns: expected plan version {VERSION:#x}, found {version:#x}")
    records, at = {}, struct.calcsize(HEADER)
    for name, count in zip(FORMATS, counts, strict=True):
        size = struct.calcsize(FORMATS[name])
        records[name] = [struct.unpack_from(FORMATS[name], data, at + i * size) for i in range(count)]
        at += count * size
    columns = dict(read_column(records, record) for record in records["columns"])
    outputs = records["outputs"]
    return Plan(
        columns=tuple(columns[i] for i in range(len(columns))),
        widths=tuple(None if record[0] < 0 else record[0] for record in outputs),
        dtypes=tuple(NAMES[record[1]] for record in outputs),
        bad_ids=BAD_IDS[bad_ids],
    )


def _names(plan: Plan) -> bytes:
    """Of each column its own and its table's, each with a zero behind it."""
    names = (name for column in plan.columns for name in (column.name, column.table_name or ""))
    return b"".join(name.encode().replace(b"\0", b"") + b"\0" for name in names)


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


def _padded(data: bytes) -> bytes:
    """To a length by the content, so that lengths differ across processes too, and on until it is free here."""
    words = -(-len(data) // 8) + zlib.crc32(data) % 61
    while not _is_free(words, padded := data.ljust(words * 8, b"\0")):
        words += 1
    return padded


def _is_free(words: int, data: bytes) -> bool:
    """Whether no other encoding has this length. Two plans are the same up to names where their encodings are."""
    if words not in _known:
        return True
    known = _known[words]
    return known is not None and known[0] == data


def _remember(tensor: torch.Tensor, plan: Plan) -> None:
    words, data = tensor.numel(), _bytes(tensor)
    if not _is_free(words, data):
        _known[words] = None
    elif words not in _known:
        _known[words] = data, plan


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _check(plan: Plan) -> None:
    """What a plan must hold, before it is encoded."""
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
