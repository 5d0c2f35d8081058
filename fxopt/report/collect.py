"""From the runtime state of an optimized model to a report, measured where inputs are given."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from fxopt.findings import Change, Findings, Miss, PassFindings, Place
from fxopt.report.census import census
from fxopt.report.data import Measurement, Note, Pass, Report, SignatureReport
from fxopt.report.machine import machine
from fxopt.runtime import dispatcher_of
from fxopt.runtime.sharded.communication import inner

if TYPE_CHECKING:
    from fxopt.runtime import Executable
    from fxopt.runtime.entry import Entry

WORTH_COMPILING = 4  # operators a compiled call, which itself costs what two or three small ones do (5 us)


def _silent(step: str) -> None:
    pass


def report(
    model: nn.Module, inputs: Mapping[int, tuple] | None = None, progress: Callable[[str], None] = _silent
) -> Report:
    """What fxopt found in a model, changed, did not change and why; with `inputs`, also what it gained.

    Args:
        model: returned by :func:`fxopt.optimize`. Without `inputs` the report covers the signatures seen so far.
        inputs: batch size to positional arguments. Each is compared with eager, then timed in turns with it,
            without gradients and in the mode (train or eval) that the model is in.
        progress: called with a line before each step.

    Raises:
        TypeError: `model` was not optimized.
        Exception: what the eager model raises on these inputs.
    """
    if (wrapped := inner(model)) is not None:
        wrapper, name = wrapped
        model = getattr(wrapper, name)
    dispatcher = dispatcher_of(model)
    if inputs and dispatcher.sharded is not None:
        raise ValueError(
            "fxopt.report: expected no inputs for a model that communicates, since ranks would time it apart"
        )
    measured = [_measured(model, batch, args, progress) for batch, args in (inputs or {}).items()]
    entries = {id(entry.findings): entry for entry in dispatcher.entries}
    every: list[Findings] = []
    for findings in (*dispatcher.findings, *(owner for owner, _ in measured)):
        if findings not in every:
            every.append(findings)
    signatures = [
        replace(
            _signature(findings, entries.get(id(findings))),
            measurements=tuple(measurement for owner, measurement in measured if owner == findings),
        )
        for findings in every
    ]
    signatures.sort(key=lambda found: min((m.batch for m in found.measurements), default=sys.maxsize))
    return Report(type(dispatcher.original).__name__, machine(), tuple(signatures))


def _measured(
    model: nn.Module, batch: int, args: tuple, progress: Callable[[str], None]
) -> tuple[Findings, Measurement]:
    from fxopt.report.measure import measure  # imports what captures models, which findings alone do not need

    progress(f"measure batch {batch:,}")
    return measure(model, batch, args)


def _signature(findings: Findings, entry: Entry | None) -> SignatureReport:
    executable = entry.executable if entry is not None else None
    return SignatureReport(
        signature=findings.signature,
        eager_reason=findings.eager_reason,
        leaves=notes(findings.leaves),
        passes=(*map(_pass, findings.passes), *_other_lowering(findings, executable)),
        operators_before=findings.operators_before,
        operators_after=findings.operators_after,
        roles=census(executable.capture.graph.graph, executable.graph.graph) if executable and executable.graph else (),
        max_error=findings.max_error,
        witness=findings.witness,
        untold=findings.untold,
        graphs=findings.graphs,
        seconds=dict(findings.seconds),
    )


def _other_lowering(findings: Findings, executable: Executable | None) -> tuple[Pass, ...]:
    """What Config(lower="inductor") would compile, where it was not asked for."""
    if executable is None or executable.graph is None or any(ran.name == "lowering" for ran in findings.passes):
        return ()
    from fxopt.lowering.islands import left_to_loops  # imports what captures models

    operators, calls = left_to_loops(executable.graph)
    if operators < WORTH_COMPILING * max(1, calls):
        return ()
    text = f'{operators} operators could be {calls} compiled calls: Config(lower="inductor") may pay, at seconds a call'
    return (Pass("lowering", misses=(Note(text, "", 1, Place()),)),)


def _pass(found: PassFindings) -> Pass:
    return Pass(found.name, notes(found.changes), notes(found.misses), notes(found.rolled_back), found.seconds)


def notes(found: Sequence[Change] | Sequence[Miss]) -> tuple[Note, ...]:
    """Findings that differ only in names and numbers as one note with a count, in order of first appearance."""
    groups: dict[tuple[str, str], list[tuple[str, str, Place]]] = {}
    for text, why, place in _texts(found):
        groups.setdefault((_shape(text), _shape(why)), []).append((text, why, place))
    return tuple(Note(*group[0][:2], len(group), group[0][2]) for group in groups.values())


def _texts(found: Iterable[Change | Miss]) -> Iterable[tuple[str, str, Place]]:
    for item in found:
        if isinstance(item, Miss):
            yield item.reason, "", item.place
        else:
            yield item.what, item.why, item.place


def _shape(text: str) -> str:
    """`text` without its names in quotes and its numbers."""
    return re.sub(r"'[^']*'|\d+", "#", text)
