"""From the runtime state of an optimized model to a report, measured where inputs are given."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

import fxopt
from fxopt.findings import Change, Findings, Miss, PassFindings, Place
from fxopt.machine import processor
from fxopt.report.census import census
from fxopt.report.data import Advice, Machine, Note, Pass, Report, SignatureReport
from fxopt.report.graphs import Graphs
from fxopt.report.sources import Sources
from fxopt.runtime import dispatcher_of
from fxopt.runtime.sharded.communication import inner

if TYPE_CHECKING:
    from fxopt.report.measure import Measured
    from fxopt.runtime import Executable
    from fxopt.runtime.entry import Entry

WORTH_COMPILING = 4  # operators a compiled call, which itself costs what two or three small ones do (5 us)


def _silent(step: str) -> None:
    pass


def report(
    model: nn.Module,
    inputs: Mapping[int, tuple] | None = None,
    progress: Callable[[str], None] = _silent,
    *,
    training: bool = False,
    compare: Sequence[str] = (),
    command: str = "",
) -> Report:
    """What fxopt found in a model, changed, did not change and why; with `inputs`, also what it gained.

    Args:
        model: returned by :func:`fxopt.optimize`. Without `inputs` the report covers the signatures seen so far.
        inputs: batch size to positional arguments. Each is compared with eager, then timed in turns with it, in the
            mode (train or eval) that the model is in.
        progress: called with a line before each step.
        training: time training steps (forward and backward) in place of forwards without gradients.
        compare: contenders to time in the same turns; "torch.compile" is the only one.
        command: how the report was asked for, to be shown in it.

    Raises:
        TypeError: `model` was not optimized.
        ValueError: a name in `compare` that stands for nothing.
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
    measured = [_measured(model, batch, args, progress, training, compare) for batch, args in (inputs or {}).items()]
    entries = {id(entry.findings): entry for entry in dispatcher.entries}
    every: list[Findings] = []
    for findings in (*dispatcher.findings, *(each.findings for each in measured)):
        if findings not in every:
            every.append(findings)
    if measured:
        progress("read the graphs")
    sources = Sources()
    signatures = [
        _signature(
            findings, entries.get(id(findings)), [each for each in measured if each.findings == findings], sources
        )
        for findings in every
    ]
    signatures.sort(key=lambda found: min((m.batch for m in found.measurements), default=sys.maxsize))
    here = _machine(dispatcher.original, measuring=bool(measured))
    name = type(dispatcher.original).__name__
    return Report(name, here, tuple(signatures), training, command, sources.lines())


def _measured(
    model: nn.Module,
    batch: int,
    args: tuple,
    progress: Callable[[str], None],
    training: bool,
    compare: Sequence[str],
) -> Measured:
    from fxopt.report.contenders import OTHERS
    from fxopt.report.measure import measure  # imports what captures models, which findings alone do not need

    if unknown := [name for name in compare if name not in OTHERS]:
        raise ValueError(f"compare: expected names of {', '.join(OTHERS)}, found {unknown[0]!r}")
    progress(f"measure batch {batch:,}")
    return measure(model, batch, args, training, compare)


def _signature(
    findings: Findings, entry: Entry | None, measured: Sequence[Measured], sources: Sources
) -> SignatureReport:
    executable = entry.executable if entry is not None else None
    graphs = Graphs.of(executable, measured, sources) if executable is not None else Graphs()
    passes = tuple(_pass(ran, graphs) for ran in findings.passes)
    leaves = notes(findings.leaves, graphs)
    return SignatureReport(
        signature=findings.signature,
        eager_reason=findings.eager_reason,
        leaves=leaves,
        passes=(*passes, *_other_lowering(findings, executable)),
        operators_before=findings.operators_before,
        operators_after=findings.operators_after,
        roles=census(executable.capture.graph.graph, executable.graph.graph) if executable and executable.graph else (),
        max_error=findings.max_error,
        witness=findings.witness,
        untold=findings.untold,
        graphs=findings.graphs,
        seconds=dict(findings.seconds),
        measurements=tuple(each.measurement for each in measured),
        advice=_advice(measured, executable, passes, leaves),
        before=graphs.before,
        after=graphs.after,
    )


def _advice(
    measured: Sequence[Measured], executable: Executable | None, passes: Sequence[Pass], leaves: Sequence[Note]
) -> tuple[Advice, ...]:
    if not measured:
        return ()
    from fxopt.report.advice import advised

    return advised(measured, executable, passes, leaves)


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


def _pass(found: PassFindings, graphs: Graphs) -> Pass:
    changes, misses, rolled_back = (notes(each, graphs) for each in (found.changes, found.misses, found.rolled_back))
    return Pass(
        found.name, changes, tuple(sorted(misses, key=lambda note: -(note.stake or 0.0))), rolled_back, found.seconds
    )


def notes(found: Sequence[Change] | Sequence[Miss], graphs: Graphs | None = None) -> tuple[Note, ...]:
    """Findings that differ only in names and numbers as one note with a count, in order of first appearance."""
    groups: dict[tuple[str, str], list[Change | Miss]] = {}
    for item in found:
        text, why = _words(item)
        groups.setdefault((_shape(text), _shape(why)), []).append(item)
    return tuple(_note(group, graphs or Graphs()) for group in groups.values())


def _note(group: Sequence[Change | Miss], graphs: Graphs) -> Note:
    first, (text, why) = group[0], _words(group[0])
    graphs.sources.add(first.place)
    if isinstance(first, Change):
        return Note(text, why, len(group), first.place, graphs.captured(first.old), graphs.rewritten(first.new))
    return Note(text, why, len(group), first.place, stake=graphs.stake([item.place for item in group]))


def _words(item: Change | Miss) -> tuple[str, str]:
    return (item.reason, "") if isinstance(item, Miss) else (item.what, item.why)


def _shape(text: str) -> str:
    """`text` without its names in quotes and its numbers."""
    return re.sub(r"'[^']*'|\d+", "#", text)


def _machine(model: nn.Module, measuring: bool) -> Machine:
    """The machine that times were measured on, of the model's device; what that reaches is measured where times are."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bandwidth = arithmetic = None
    if measuring:
        from fxopt.report.own_time import rates

        bandwidth, arithmetic = rates(device)
    threads = torch.get_num_threads()
    return Machine(processor(), threads, torch.__version__, name, fxopt.__version__, bandwidth, arithmetic)
