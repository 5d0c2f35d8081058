"""A report as plain data: what a model spends its time on, what was changed and gained, and what was not and why.

`text`, `html` and the JSON of `schema` are views of it. docs/report.md describes the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxopt.findings import Place

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Machine:
    """What the times depend on besides the model.

    Attributes:
        bandwidth: bytes a second of a large copy; arithmetic: float operations a second of a large matrix product, in
            the precision that the model computes in (None: not measured).
    """

    cpu: str
    threads: int
    torch: str
    device: str = "cpu"
    fxopt: str = ""
    bandwidth: float | None = None
    arithmetic: float | None = None


@dataclass(frozen=True)
class Note:
    """`count` findings that differ only in names and numbers; `text`, `why` and `first` are those of the first one.

    Attributes:
        before, after: nodes of the first one, as in "linear f32[B, 512]", a few of them.
        stake: seconds of an optimized call, at the largest batch size that was measured, of the operators at these
            places that are as they were: more cannot be saved there (None: not measured).
    """

    text: str
    why: str
    count: int
    first: Place
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    stake: float | None = None


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
    """One kind of work at one batch size: operators by their own time, and what lies between them.

    The kinds of a measurement add up to its whole calls.

    Attributes:
        before: seconds of an eager call; share: of the whole call (0 to 1).
        after: seconds of an optimized call (None: it does not run operator by operator).
    """

    kind: str
    before: float
    share: float
    after: float | None


@dataclass(frozen=True)
class Contender:
    """Another way to run the model, timed in the same turns. Seconds are None where it failed: `problem` says why."""

    name: str
    seconds: float | None = None
    speedup: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Measurement:
    """One batch size. Seconds are of whole calls, taken in turns with eager; None: not measured.

    Attributes:
        speedup: median over the turns of eager / optimized (None also where it cannot be trusted); quartiles: of the
            same, how far to trust it.
        distrust: why the times of this batch size say nothing, after several tries ("" where they do).
        max_error: largest absolute difference from eager on these inputs.
        problem: why there is no comparison ("" when there is one).
        others: what `--compare` named.
    """

    batch: int
    eager: float | None = None
    optimized: float | None = None
    speedup: float | None = None
    quartiles: tuple[float, float] | None = None
    max_error: float | None = None
    problem: str = ""
    spending: tuple[Spending, ...] = ()
    distrust: str = ""
    others: tuple[Contender, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Something a user can do. `gain`: seconds of a call at `batch` that it may save at most (None: not known)."""

    text: str
    gain: float | None = None
    batch: int | None = None
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class Tally:
    """How many operators of one role a call runs, as captured (`before`) and now; one call for many columns is one."""

    role: str
    before: int
    after: int


@dataclass(frozen=True)
class Block:
    """Parts of a graph that look alike, such as 880 embedding columns: one box of the picture.

    Attributes:
        kind: of work; steps: the operators of one part with their results, as in "linear f32[B, 512]".
        parts: the places of the parts, (module path, "file:line"), one each.
        reads: numbers of the blocks whose results it reads.
        seconds: own time of all parts in a call at each batch size.
        bytes, operations: what a call of all parts must move and compute at each batch size (0: not counted).
    """

    kind: str
    steps: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    reads: tuple[int, ...] = ()
    seconds: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    operations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SignatureReport:
    """One input signature of the model; see `fxopt.findings.Findings` for what the names mean.

    Attributes:
        roles: the operators of a call by what they are there for (empty: the model stays eager).
        before, after: the graph as it was captured and as it runs now, in blocks that look alike.
        advice: what a user can do, what gains most first.
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
    advice: tuple[Advice, ...] = ()
    before: tuple[Block, ...] = ()
    after: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `fxopt.report` returns; print it.

    Attributes:
        training: whether a call is a training step, forward and backward.
        command: the command that made it ("" in a program).
        sources: lines of the user's files by "file:line", those around it joined by line breaks.
    """

    model: str
    machine: Machine
    signatures: tuple[SignatureReport, ...] = ()
    training: bool = False
    command: str = ""
    sources: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; "schema" names the version of their form (docs/report.md)."""
        from fxopt.report.schema import dumped

        return dumped(self)

    def to_json(self) -> str:
        """The same as text."""
        from fxopt.report.schema import encoded

        return encoded(self)

    def to_html(self) -> str:
        """One page that needs nothing else, for a browser."""
        from fxopt.report.html import page

        return page(self)

    def __str__(self) -> str:
        from fxopt.report.text import plain

        return plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fxopt.report.text import render

        yield from render(self, options.max_width)
