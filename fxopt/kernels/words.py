"""Numbers as the int64 words of a plan; words.h reads them."""

from __future__ import annotations

import struct


def bits_of(value: float) -> int:
    """The bits of a double."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def float_of(bits: int) -> float:
    """The inverse of :func:`bits_of`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]
