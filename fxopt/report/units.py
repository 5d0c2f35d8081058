"""Quantities as a person reads them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Three digits and a unit: "38.2 us", "1.20 ms", "3.1 s"; 0 has none."""
    if value == 0:
        return "0"
    if value >= 0.9995:
        return f"{value:.1f} s"
    number, unit = (value * 1e3, "ms") if value >= 0.9995e-3 else (value * 1e6, "us")
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"


def count(number: int, noun: str, plural: str = "") -> str:
    """As in: 1 lookup; 1,000 lookups; 2 libraries, whose plural is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def size(number: float) -> str:
    """Bytes: "12 MB", "1.3 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if number < 999.5:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def times(factor: float) -> str:
    """A speed-up: "12x", "3.1x", "0.97x"."""
    digits = 2 if factor < 0.995 else 0 if factor >= 9.95 else 1
    return f"{factor:.{digits}f}x"


def error(value: float | None) -> str:
    """A largest error; 0 says that the results are equal bit for bit."""
    return "" if value is None else "none" if value == 0 else f"{value:.2g}"
