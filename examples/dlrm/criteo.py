"""Reader of the Criteo display-advertising format: a label, 13 integers and 26 hexadecimal categories a row.

As published (tab-separated, no header) or comma-separated with a header, plain or gzip; any field but the label
may be missing. Rows are streamed: memory holds one batch.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

INTEGERS = 13
CATEGORIES = 26
FIELDS = 1 + INTEGERS + CATEGORIES
MISSING = -1
HELD_OUT_EVERY = 10
Part = Literal["all", "train", "held-out"]
_HEX = "[0-9a-fA-F]{0,15}"  # 15 digits: fits int64 with room for MISSING


class CriteoError(ValueError):
    """A row that is not in the format; the message names the file, the line and the field."""


class Batch(NamedTuple):
    """dense [B, 13] float32, sparse ids [B, 26] int64, labels [B] float32 (0 or 1)."""

    dense: Tensor
    sparse: Tensor
    labels: Tensor


def read_batches(
    path: str | Path,
    batch_size: int,
    table_rows: Sequence[int],
    part: Part = "all",
    on_progress: Callable[[float], None] | None = None,
) -> Iterator[Batch]:
    """Batches of the file's rows in order; the last one may be smaller.

    Args:
        table_rows: the size each category is hashed to.
        part: every tenth row is held out from training, so both parts follow the file's order in time.
        on_progress: told the fraction of the file that was read.

    Raises CriteoError for a bad row, OSError for a file that cannot be read.
    """
    if batch_size < 1:
        raise ValueError(f"read_batches: expected a batch size of 1 or more, found {batch_size}")
    if len(table_rows) != CATEGORIES or min(table_rows) < 2:
        raise ValueError(f"read_batches: expected {CATEGORIES} table sizes of 2 or more, found {list(table_rows)}")
    with open(path, "rb") as file, _text(file) as text:
        size = max(1, Path(path).stat().st_size)
        rows = _rows(text, str(path), part)
        while chunk := list(islice(rows, batch_size)):
            if on_progress is not None:
                on_progress(file.tell() / size)
            labels, integers, categories = zip(*chunk, strict=True)
            yield Batch(
                torch.from_numpy(log_transform(np.array(integers, dtype=np.float64))),
                torch.from_numpy(hash_categories(np.array(categories, dtype=np.int64), table_rows)),
                torch.tensor(labels, dtype=torch.float32),
            )


def log_transform(integers: np.ndarray) -> np.ndarray:
    """sign(x) * log(1 + |x|) as float32: the counts are heavy-tailed and a few features go below zero."""
    return (np.sign(integers) * np.log1p(np.abs(integers))).astype(np.float32)


def hash_categories(categories: np.ndarray, table_rows: Sequence[int]) -> np.ndarray:
    """Values [B, 26] int64 to ids: 0 for a missing one, else 1 .. rows-1 by a hash that is the same everywhere.

    The mixing is splitmix64's (Steele, Lea, Flood 2014), salted with the feature's number.
    """
    with np.errstate(over="ignore"):
        salt = np.arange(1, CATEGORIES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = categories.astype(np.uint64) + salt
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    ids = 1 + (x % (np.array(table_rows, dtype=np.uint64) - np.uint64(1))).astype(np.int64)
    return np.where(categories == MISSING, 0, ids)


Row = tuple[float, list[float], list[int]]


def _rows(lines: TextIOWrapper, name: str, part: Part) -> Iterator[Row]:
    line_number = rows = 0
    separator, tail_form = "\t", re.compile("")
    try:
        for line_number, text in enumerate(lines, start=1):
            line = text.rstrip("\r\n")  # never more: trailing separators are missing fields
            if line_number == 1:
                separator = "\t" if "\t" in line else ","
                tail_form = re.compile(separator.join([_HEX] * CATEGORIES))
                if line.lower().startswith("label" + separator):
                    continue
            if not line:
                continue
            rows += 1
            if part == "all" or (part == "held-out") == (rows % HELD_OUT_EVERY == 0):
                yield _parse(line, separator, tail_form, f"{name}:{line_number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CriteoError(f"{name}:{line_number + 1}: damaged gzip file: {error}") from error


def _text(file: BufferedReader) -> TextIOWrapper:
    zipped = file.peek(2)[:2] == b"\x1f\x8b"
    # Undecodable bytes become characters that no field may hold, so they are reported with their line.
    return TextIOWrapper(gzip.GzipFile(fileobj=file) if zipped else file, encoding="utf-8-sig", errors="replace")


def _parse(line: str, separator: str, tail_form: re.Pattern[str], where: str) -> Row:
    fields = line.split(separator, 1 + INTEGERS)
    if len(fields) != 2 + INTEGERS or fields[0] not in ("0", "1") or not tail_form.fullmatch(fields[-1]):
        raise CriteoError(f"{where}: {_complaint(line.split(separator))}")
    try:
        integers = [float(text) if text else 0.0 for text in fields[1:-1]]
        if not math.isfinite(sum(map(abs, integers))):
            raise ValueError
    except ValueError:
        raise CriteoError(f"{where}: {_complaint(line.split(separator))}") from None
    categories = [int(text, 16) if text else MISSING for text in fields[-1].split(separator)]
    return float(fields[0]), integers, categories


def _complaint(fields: list[str]) -> str:
    """What is wrong with a row that did not parse; slow, for the one bad row."""
    if len(fields) != FIELDS:
        return f"expected {FIELDS} fields (label, {INTEGERS} integers, {CATEGORIES} categories), found {len(fields)}"
    if fields[0] not in ("0", "1"):
        return f"label: expected 0 or 1, found {fields[0]!r}"
    for position, text in enumerate(fields[1 + INTEGERS :], start=1):
        if not re.fullmatch(_HEX, text):
            return f"category C{position}: expected at most 15 hexadecimal digits, found {text!r}"
    for position, text in enumerate(fields[1 : 1 + INTEGERS], start=1):
        if text and not _is_finite(text):
            return f"integer I{position}: expected a finite number, found {text!r}"
    return "integers: their magnitudes overflow"


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
