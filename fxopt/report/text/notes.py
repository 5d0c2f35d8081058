"""What was changed, what was not and why, and how it was done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxopt.report.data import Advice, Note, SignatureReport
from fxopt.report.text.forms import in_letters
from fxopt.report.units import count, error, seconds

_MOST_KINDS = 12  # of changes or misses of one pass


def advice(found: SignatureReport) -> Iterator[tuple[str, Text]]:
    """What a user can do, and what that saves at most."""
    for number, each in enumerate(found.advice, 1):
        place = (f" ({each.place})", "cyan") if each.place.line else ""
        yield f"{number}.", Text.assemble(in_letters(each.text, found.signature), place, (_gain(each), "green"))


def _gain(advice: Advice) -> str:
    if advice.gain is None:
        return ""
    return f"; saves at most {seconds(advice.gain)} of a call at batch {advice.batch:,}"


def changes(found: SignatureReport) -> RenderableType:
    rows = []
    for item in found.passes:
        if item.name == "normalize":
            rows += [(item.name, _tally(item.changes))] if item.changes else []
            continue
        for note in item.changes[:_MOST_KINDS]:
            what = Text.assemble(in_letters(note.text, found.signature), (f" ({_where(note)})", "cyan"))
            why = in_letters(note.why, found.signature)
            rows.append((item.name, what.append(f"\nsafe: {why}", "dim") if why else what))
        rows += _more(item.name, item.changes)
    return grid(rows)


def _tally(notes: Sequence[Note]) -> Text:
    """Spellings of one thing that became one: kinds and how many, without their places."""
    ordered = sorted(notes, key=lambda note: -note.count)
    parts = [(f"{note.count:,} x {note.text}", f": {note.why}" if note.why else "") for note in ordered]
    return Text("\n").join(Text.assemble(what, (why, "dim")) for what, why in parts)


def _more(name: str, notes: Sequence[Note]) -> list[tuple[str, Text]]:
    """What a pass found beyond the kinds that are shown."""
    rest = notes[_MOST_KINDS:]
    if not rest:
        return []
    places = sum(note.count for note in rest)
    return [(name, Text(f"{count(len(rest), 'more kind')} in {count(places, 'place')}; --json has all", "dim"))]


def reasons(found: SignatureReport) -> Iterator[tuple[str, Text]]:
    """What stopped the capture, opaque submodules, rewrites taken back, and near misses, the most expensive first."""
    if found.eager_reason:
        yield "the model", Text(found.eager_reason)
    for leaf in found.leaves:
        yield "kept as it is", _sentence(leaf, leaf.text)
    for item in found.passes:
        for note in item.rolled_back:
            yield item.name, _sentence(note, f"taken back: {note.why or note.text}")
    for item in sorted(found.passes, key=lambda ran: -max((note.stake or 0.0 for note in ran.misses), default=0.0)):
        for note in item.misses[:_MOST_KINDS]:
            yield item.name, _sentence(note, in_letters(note.text, found.signature)).append(_stake(note), "dim")
        yield from _more(item.name, item.misses)
    if found.untold:
        yield "verification", Text(in_letters(found.untold, found.signature))


def work(found: SignatureReport, verbose: bool) -> Iterator[tuple[str, Text]]:
    """What each stage cost, and, where it is asked for, the passes that found nothing to do."""
    idle = [item.name for item in found.passes if not (item.changes or item.misses or item.rolled_back)]
    if idle and verbose:
        yield "found no match", Text(", ".join(idle))
    if found.seconds:
        stages = ", ".join(f"{stage} {seconds(spent)}" for stage, spent in found.seconds.items())
        yield "took", Text(f"{seconds(sum(found.seconds.values()))}: {stages}")
    if found.graphs:
        yield "replayed", Text(in_letters(found.graphs, found.signature))
    if found.max_error is not None:
        made_up = f", and at made-up sizes {in_letters(found.witness, found.signature)}" if found.witness else ""
        what = f"against eager when it was captured{made_up}; largest error {error(found.max_error)}"
        yield "verified", Text(what)


def _stake(note: Note) -> str:
    """More than what runs there cannot be saved."""
    return f" (these operators take {seconds(note.stake)} now)" if note.stake else ""


def _sentence(note: Note, text: str) -> Text:
    return Text.assemble((_where(note), "cyan"), ": ", text)


def _where(note: Note) -> str:
    """As in: tables.0 at model.py:64 and 879 like it."""
    return f"{note.first} and {note.count - 1:,} like it" if note.count > 1 else str(note.first)


def grid(rows: Sequence[tuple[str, Text]]) -> RenderableType:
    """A name, once for all its rows, beside text that wraps."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for name, text in rows:
        table.add_row("" if name == last else name, text)
        last = name
    return table
