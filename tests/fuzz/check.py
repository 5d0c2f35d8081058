"""Eager against optimized, call by call: values, gradients, state, effects, errors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import nn

from fxopt.config import Config
from fxopt.kernels.by_rows.many import looking
from fxopt.optimize import optimize
from fxopt.torch_internals.seeds import seed_started
from tests.fuzz.comparison import Comparison
from tests.fuzz.outcome import equal, made_of, outcome_of, short, state_of
from tests.fuzz.placed import CPU, elsewhere, is_spoilt, moved, on_cpu, on_default
from tests.fuzz.programs import Loaded, Program, Sizes


@dataclass(frozen=True)
class Failure:
    """One difference. kind: what shrinking keeps. sizes: of the call, None for the capture."""

    kind: str
    message: str
    sizes: Sizes | None = None

    def __str__(self) -> str:
        where = f"at {tuple(self.sizes)}" if self.sizes else "at the capture"
        return f"{self.kind} {where}: {self.message}"


def check(program: Program, seen: Counter[str] | None = None, loaded: Loaded | None = None) -> Failure | None:
    """The first difference between eager and optimized, or None. `seen` counts what was run and what was rewritten."""
    with looking(pretended=program.many):
        return _checked(program, Counter() if seen is None else seen, loaded)


def _checked(program: Program, seen: Counter[str], loaded: Loaded | None) -> Failure | None:
    build, made = loaded or program.loaded()
    inputs, eager = on_default(made), on_cpu(build)()
    calls, rejected = list(enumerate((program.captured, *program.later))), False
    config = Config(verify=program.verify, tune="off")
    with torch.set_grad_enabled(program.grad):
        if elsewhere():
            harmless = _harmless(eager, made, calls, program)
            seen["left out"] += len(calls) - len(harmless)
            if not harmless:
                return None
            calls, eager = harmless, moved(eager, torch.get_default_device())
        failure, fast = _captured(program, copy.deepcopy(eager), eager, inputs, config)
        if failure is not None or fast is None:
            return failure
        for number, sizes in calls:
            wide = copy.deepcopy(eager)
            expected = outcome_of(eager, inputs, sizes, number, program)
            if isinstance(expected.error, torch.AcceleratorError):
                raise expected.error  # the device is lost, by nothing of ours
            found = outcome_of(fast, inputs, sizes, number, program)
            seen["calls"] += 1
            seen["raised"] += expected.error is not None
            rejected |= number == 0 and expected.error is not None
            comparison = Comparison(program, wide, made, sizes, number, expected, found)
            difference = comparison.difference()
            if difference is not None:
                return Failure(*difference, sizes)
            _round_alike(fast, eager)
    _count(fast, seen)
    return None if rejected else _hidden(fast, program, loaded)


def _harmless(
    eager: nn.Module, made: Callable, calls: list[tuple[int, Sizes]], program: Program
) -> list[tuple[int, Sizes]]:
    """The calls up to the first that raises on the CPU; the other device may be lost by it."""
    with CPU:
        twin = copy.deepcopy(eager)
        return list(takewhile(lambda call: outcome_of(twin, made, call[1], call[0], program).error is None, calls))


def _captured(
    program: Program, model: nn.Module, eager: nn.Module, inputs: Callable, config: Config
) -> tuple[Failure | None, nn.Module | None]:
    """The optimized model. Capturing changes nothing, and raises only what eager raises."""
    if not program.example:
        return None, optimize(model, config=config)
    seed_started(0)
    example = made_of(inputs(*program.captured), program.grad)
    before, state = [t.detach().clone() for t in example], torch.get_rng_state()
    try:
        fast = optimize(model, example, config)
    except torch.AcceleratorError as error:
        return Failure("raises", f"optimize: {error!r}"), None
    except Exception as error:
        return _capture_error(error, eager, inputs, program)
    if is_spoilt():
        return Failure("raises", "optimize leaves the device in an error"), None
    for i, (old, new) in enumerate(zip(before, example, strict=True)):
        if not equal(old, new.detach()):
            return Failure("capture edits", f"input {i} after optimize"), None
    if not torch.equal(state, torch.get_rng_state()):
        return Failure("capture edits", "random numbers were drawn"), None
    now = dict(state_of(model))
    for name, value in state_of(eager):
        if name not in now or not equal(value, now[name]):
            return Failure("capture edits", f"{name} after optimize"), None
    if now.keys() != dict(state_of(eager)).keys():
        return Failure("capture edits", f"{sorted(now.keys() - dict(state_of(eager)).keys())} are new"), None
    return None, fast


def _capture_error(
    error: Exception, eager: nn.Module, inputs: Callable, program: Program
) -> tuple[Failure | None, nn.Module | None]:
    seed_started(0)
    try:
        copy.deepcopy(eager)(*made_of(inputs(*program.captured), program.grad))
    except Exception as own:
        same = isinstance(error, type(own))
        return (None if same else Failure("other error", f"eager {own!r}, optimize {error!r}")), None
    return Failure("raises", f"optimize: {type(error).__name__}: {error}"), None


def _round_alike(fast: nn.Module, eager: nn.Module) -> None:
    """Each call starts from one state: what a statistic of two rows has been rounded by stays in it."""
    found = dict((*fast.named_parameters(), *fast.named_buffers()))
    for name, value in (*eager.named_parameters(), *eager.named_buffers()):
        if not equal(value, found[name]):
            found[name].data.copy_(value.data)


def _count(fast: nn.Module, seen: Counter[str]) -> None:
    """Which passes found something, and how many captures there are."""
    seen["graphs"] += 1
    for entry in fast._fxopt.entries:  # type: ignore[union-attr]
        seen["captures"] += entry.executable is not None
        seen["eager"] += entry.executable is None
        for ran in entry.findings.passes:
            if ran.changes:
                seen[f"pass {ran.name}"] += 1


_DROPPED = ("the captured graph", "the capture failed in")
_RAISED = "the optimized graph raised"


def _hidden(fast: nn.Module, program: Program, loaded: Loaded | None) -> Failure | None:
    """A graph that was dropped after it raised, or what verification has hidden: it turns down rounding as well, such
    as that behind a norm of few rows, so that what counts is what the rewrite gives without it."""
    for entry in fast._fxopt.entries:  # type: ignore[union-attr]
        reason = entry.findings.eager_reason or ""
        # What a forward catches may be raised for some data: eager goes on.
        catches = any(line.startswith("try:") for line in program.lines)
        if any(text in reason for text in _DROPPED) or (_RAISED in reason and not catches):
            return Failure("dropped", short(reason))
        for ran in entry.findings.passes:
            if ran.rolled_back and program.verify != "off":
                return _checked(replace(program, verify="off"), Counter(), loaded)
    return None
