"""What fxopt did to a model, as plain data. Passes write it, `fxopt.report` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where a node comes from: module path ("" is the root), source line ("model.py:12" or "") and the file's path."""

    module: str = ""
    line: str = ""
    path: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return " at ".join(part for part in (self.module, self.line) if part) or "the model's forward"


@dataclass(frozen=True)
class Miss:
    """Something that nearly matched. `reason` says what a user can do about it."""

    pattern: str
    reason: str
    place: Place


@dataclass(frozen=True)
class Change:
    """One rewrite: what it replaced, and why that is safe (or, rolled back, why it was not).

    old: names of the nodes of the captured graph that it stands for; new: names of the nodes that it added.
    """

    number: int
    site: str
    what: str
    why: str
    place: Place
    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@dataclass
class PassFindings:
    """One pass over one graph."""

    name: str
    changes: list[Change] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    rolled_back: list[Change] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Findings:
    """One capture of one model.

    Attributes:
        signature: the inputs it was captured for, readable ("f32[B, 13], i64[B, 26]; eval").
        eager_reason: why the model stays eager for this signature ("" when it was optimized).
        leaves: submodules that were kept opaque, with the reason and the line that stopped the capture.
        operators_before / operators_after: calls of operators per forward.
        max_error: largest absolute difference from eager seen by verification (None: not verified).
        witness: sizes that were made up for verification because those of the call could not tell ("" for none).
        untold: why none could be made up, and what follows ("" where they were, or need not be).
        seconds: wall time by stage ("capture", "rewrite", "verify", "race", ...).
        rewrites: how many rewrites were tried.
        graphs: what captured CUDA graphs serve and hold, or why there are none; "" where none were asked for, and for
            a model on the CPU.
    """

    signature: str = ""
    eager_reason: str = ""
    leaves: list[Miss] = field(default_factory=list)
    passes: list[PassFindings] = field(default_factory=list)
    operators_before: int = 0
    operators_after: int = 0
    max_error: float | None = None
    witness: str = ""
    untold: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    rewrites: int = 0
    graphs: str = ""

    def blame(self, number: int) -> list[tuple[str, Change]]:
        """(pass, change) of a rewrite by its number; none where it was not applied."""
        return [(ran.name, change) for ran in self.passes for change in ran.changes if change.number == number]
