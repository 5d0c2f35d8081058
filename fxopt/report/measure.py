"""Eager against optimized on one batch: verified first, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.report.contenders import Call, Step, contenders, forward, step
from fxopt.report.data import Measurement
from fxopt.report.kinds import kinds, kinds_after
from fxopt.report.own_time import OwnTimes, credit, own_times
from fxopt.report.spending import BACKWARD, BETWEEN, by_kind, spending
from fxopt.report.turns import taken
from fxopt.runtime import Executable, dispatcher_of
from fxopt.runtime.context import ambient
from fxopt.runtime.dispatch import Dispatcher
from fxopt.runtime.entry import Entry
from fxopt.verify import verify


@dataclass(frozen=True)
class Measured:
    """One batch size of the capture that served it, whose findings these are.

    before, after: by operator, of the captured and of the optimized graph (None: not taken apart).
    """

    findings: Findings
    measurement: Measurement
    before: OwnTimes | None = None
    after: OwnTimes | None = None


def measure(model: nn.Module, batch: int, args: tuple, training: bool = False, compare: Sequence[str] = ()) -> Measured:
    """What the capture that serves `args` gains there.

    Args:
        training: time a training step, forward and backward, in place of a forward without gradients.
        compare: names of other contenders.

    Raises:
        Exception: what the eager model raises on `args`.
    """
    dispatcher = dispatcher_of(model)
    with torch.set_grad_enabled(training), _undisturbed(dispatcher.original):
        run = step if training else forward
        model(*args)  # captures where no capture serves these arguments
        dispatcher.original(*args)  # may change what the capture depends on, and would at every turn
        entry, tensors = _serving(dispatcher, args)
        if entry is None and not dispatcher.refused:
            reason = "no capture holds for a second call: forward changes what the capture depends on"
            return Measured(Findings(eager_reason=reason), Measurement(batch, problem="captured anew at every call"))
        found = Measurement(batch)
        executable = entry.executable if entry is not None else None
        if entry is None or executable is None:
            findings = entry.findings if entry is not None else next(reversed(dispatcher.refused.values()))
            found = replace(found, problem="stays eager")
            return Measured(findings, _timed(model, dispatcher.original, found, args, run, compare))
        level = Config(verify="full") if training else Config()
        verdict = verify(executable, executable.capture.graph, dispatcher.original, args, {}, level)
        found = replace(found, max_error=verdict.max_error)
        if not verdict.ok:
            return Measured(entry.findings, replace(found, problem=f"differs from eager: {verdict.message}"))
        found = _timed(model, dispatcher.original, found, args, run, compare)
        calls = run(dispatcher.original, args), run(model, args)
        return _taken_apart(
            Measured(entry.findings, found), executable, tensors, calls, BACKWARD if training else BETWEEN
        )


def _timed(
    model: nn.Module, original: nn.Module, found: Measurement, args: tuple, run: Step, compare: Sequence[str]
) -> Measurement:
    calls: list[Call] = [run(original, args), run(model, args)]
    others = contenders(compare, original, args, run)
    every = taken([*calls, *(other.call for other in others if other.call is not None)])
    timed = iter(every.seconds[2:])
    return replace(
        found,
        eager=every.seconds[0],
        optimized=every.seconds[1],
        speedup=None if every.distrust else every.ratios[1],
        quartiles=every.quartiles,
        distrust=every.distrust,
        others=tuple(other.measured(every.seconds[0], timed, every.distrust) for other in others),
    )


def _taken_apart(
    measured: Measured, executable: Executable, tensors: Sequence[Tensor], calls: tuple[Call, Call], rest: str
) -> Measured:
    """With the own time of each operator. calls: eager's and the optimized one's."""
    found = measured.measurement
    assert found.eager is not None and found.optimized is not None
    captured, rewritten = executable.capture.graph, executable.graph
    before = own_times(captured, tensors, calls[0], found.eager)
    kinds_before = kinds(captured.graph)
    after, spent = None, None
    if rewritten is not None:
        after = own_times(rewritten, tensors, calls[1], found.optimized)
        credit(after, before)
        names = {node.name: kind for node, kind in kinds_before.items()}
        spent = by_kind(after, kinds_after(rewritten.graph, names, before.work))
    split = spending(by_kind(before, kinds_before), found.eager, spent, found.optimized, rest)
    return replace(measured, measurement=replace(found, spending=split), before=before, after=after)


def _serving(dispatcher: Dispatcher, args: tuple) -> tuple[Entry | None, Sequence[Tensor]]:
    found = dispatcher.find(args, {}, ambient())
    if found is None:
        return None, ()
    entry, (state, inputs) = found
    return entry, [*state, *inputs]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Measuring leaves buffers (batch norm's statistics in train mode) and the random state as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices: Any = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
