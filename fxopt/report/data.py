"""A report as plain data: what a model spends its time on, what was changed and gained, and what was not and why.

Only `fxopt.report.text` knows how it looks; `to_dict` and `to_json` are the same facts for programs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxopt.findings import Place

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Machine:
    """What the times depend on besides the model."""

    cpu: str
    threads: int
    torch: str


@dataclass(frozen=True)
class Note:
    """`count` findings that differ only in names and numbers; `text`, `why` and `first` are those of the first one."""

    text: str
    why: str
    count: int
    first: Place


@dataclass(frozen=True)
class Pass:
    """One pass: what it replaced, what nearly matched, and what it took back."""

    name: str
    changes: tuple[Note, ...] = ()
    misses: tuple[Note, ...] = ()
    rolled_back: tuple[Note, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Spending:
    """One kind of work at one batch size: the whole call's time, split as its operators by themselves take theirs.

    Attributes:
        before: seconds of an eager call; share: of the whole call (0 to 1).
        after: seconds of an optimized call (None: it does not run operator by operator).
    """

    kind: str
    before: float
    share: float
    after: float | None


@dataclass(frozen=True)
class Measurement:
    """One batch size. Seconds are medians of whole calls, taken in turns with eager; None: not measured.

    Attributes:
        speedup: median over the turns of eager / optimized; quartiles: of the same, how far to trust it.
        max_error: largest absolute difference from eager on these inputs.
        problem: why there is no comparison ("" when there is one).
    """

    batch: int
    eager: float | None = None
    optimized: float | None = None
    speedup: float | None = None
    quartiles: tuple[float, float] | None = None
    max_error: float | None = None
    problem: str = ""
    spending: tuple[Spending, ...] = ()


@dataclass(frozen=True)
class Tally:
    """How many operators of one role a call runs, as captured (`before`) and now; one call for many columns is one."""

    role: str
    before: int
    after: int


@dataclass(frozen=True)
class SignatureReport:
    """One input signature of the model; see `fxopt.findings.Findings` for what the names mean.

    Attributes:
        roles: the operators of a call by what they are there for (empty: the model stays eager).
    """

    signature: str
    eager_reason: str = ""
    leaves: tuple[Note, ...] = ()
    passes: tuple[Pass, ...] = ()
    operators_before: int = 0
    operators_after: int = 0
    roles: tuple[Tally, ...] = ()
    max_error: float | None = None
    witness: str = ""
    untold: str = ""
    graphs: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `fxopt.report` returns; print it."""

    model: str
    machine: Machine
    signatures: tuple[SignatureReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from fxopt.report.text import plain

        return plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fxopt.report.text import render

        yield from render(self, options.max_width)
