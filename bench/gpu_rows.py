"""What the GPU benchmark measured, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from rich.table import Table

from bench.gpu_timing import Gpu


@dataclass(frozen=True)
class Measured:
    """Microseconds: as called, as a replay, and as one with nothing of it in L2 (None: calls replay a graph
    themselves). error: the largest difference to eager, over the largest value. made_s: seconds to the first result."""

    us: float
    graph_us: float | None
    cold_us: float | None
    error: float
    made_s: float

    @property
    def best_us(self) -> float:
        return self.us if self.graph_us is None else self.graph_us


@dataclass(frozen=True)
class Row:
    """left_out: why, by contender. builds_us: of tune()'s builds of the columns kernel."""

    case: str
    batch: int
    floor_us: float
    measured: dict[str, Measured] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    builds_us: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.case}, batch {self.batch}"


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="microseconds; floor: bytes read and written at full bandwidth, or matrix operations")
    for heading in ("case", "batch", "contender"):
        shown.add_column(heading)
    for heading in ("called", "graph", "cold L2", "floor", "of floor", "x eager", "x its graph", "error"):
        shown.add_column(heading, justify="right")
    for row in rows:
        for name, m in row.measured.items():
            times = [_text(us) for us in (m.us, m.graph_us, m.cold_us, row.floor_us)]
            floor = f"{100 * row.floor_us / m.best_us:.0f}%"
            shown.add_row(row.case, str(row.batch), name, *times, floor, *_gains(row, m), f"{m.error:.0e}")
        shown.add_section()
    return shown


def _gains(row: Row, m: Measured) -> tuple[str, str]:
    """How many times faster than eager, and than eager as a graph."""
    eager = row.measured.get("eager")
    if eager is None:
        return "", ""
    return f"{eager.us / m.best_us:.2f}", f"{(eager.graph_us or math.nan) / m.best_us:.2f}"


def _text(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each reason that somebody is missing, and one for each row whose builds were tried."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.left_out.items():
            found.setdefault((name, reason), []).append(str(row))
    for (name, reason), where in found.items():
        yield f"no {name}: {reason} ({'; '.join(where)})"
    for row in rows:
        if row.builds_us:
            yield f"{row}: {', '.join(f'{name} {us:.1f}' for name, us in row.builds_us.items())} us"


def write(target: Path, gpu: Gpu, rows: Sequence[Row]) -> None:
    told = {"gpu": gpu.as_dict(), "date": datetime.now().isoformat(timespec="seconds"), "unit": "us"}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
