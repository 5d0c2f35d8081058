"""The stages of the pipeline (optimize.py) behind the capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import Graph

from fxopt import progress
from fxopt.capture import Capture, CaptureError, LeafCall, OtherData
from fxopt.config import Config
from fxopt.dump import Dump
from fxopt.findings import Change, Findings, Miss, PassFindings, Place
from fxopt.normalize import normalize, records_nothing
from fxopt.rewrites import passes
from fxopt.rewrites.framework.core import Fuel, apply
from fxopt.rewrites.framework.direct import copied, direct
from fxopt.rewrites.framework.regions import calls_of
from fxopt.rewrites.framework.results import part_from_backward
from fxopt.rewrites.framework.sources import Sources
from fxopt.runtime import Executable
from fxopt.runtime.cuda_graphs import replayable
from fxopt.runtime.pieces import Pieces
from fxopt.runtime.turns import Turns
from fxopt.shape.standing import remembered
from fxopt.shape.whole_inputs import taken_for_granted
from fxopt.tune.tuner import Tuner
from fxopt.verify import Examples, Verdict, bisect
from fxopt.verify.slower import Race, may_be_raced, slower_passes, takes_turns

_log = logging.getLogger(__name__)
_NOWHERE = Dump(None)


def rewrite(captured: Capture, config: Config, fuel: Fuel, tuner: Tuner, dump: Dump = _NOWHERE) -> Executable:
    """Normalize a copy of the captured graph and run the passes over it; `dump` gets each graph on the way."""
    module = copied(captured.graph)
    inference = records_nothing(module.graph)
    own: list[Any] = [child for child in captured.graph.children() if hasattr(child, "own_backward")]
    kept = [Miss(call.place.module, call.reason, call.place) for call in own]
    leaves = [Miss(leaf.path, leaf.reason, leaf.place) for leaf in captured.leaves]
    findings = Findings(signature_of(captured), leaves=leaves + kept)
    findings.operators_before = operators(module.graph)
    dump.graph("captured", module.graph)
    findings.passes.append(normalize(module, inference))
    dump.graph("normalize", module.graph)
    sources = None if inference else Sources.hold(module)
    findings.passes[0].misses += sources.misses if sources is not None else []
    with remembered(module.graph):
        for rewrite_pass in passes(config):
            progress.step(f"rewrite: {rewrite_pass.name}")
            ran = apply(rewrite_pass, module, fuel, inference, tuner, config)
            findings.passes.append(ran)
            _log.debug("%s: %d changes, %d near misses", ran.name, len(ran.changes), len(ran.misses))
            if ran.changes:
                dump.graph(ran.name, module.graph)
    for name, told in (("sizes", captured.fixed), ("answers", captured.taken)):
        if told:
            findings.passes.append(PassFindings(name, misses=list(told)))
    findings.passes[0].changes += normalize(module, inference).changes  # what the passes made alike
    if sources is not None:
        sources.release()
        part_from_backward(module, captured.graph)
    findings.operators_after, findings.rewrites = operators(module.graph), fuel.used
    whole, torn = taken_for_granted(module.graph)
    captured.guards = replace(captured.guards, whole=whole, torn=torn)
    module.recompile()
    fast = copied(module)
    direct(fast, inference, len(captured.state))
    return Executable(captured, fast.forward, findings, module)


def examples_of(captured: Capture, model: nn.Module, args: tuple, kwargs: dict[str, Any], config: Config) -> Examples:
    """What the graphs of a capture are verified on. Where that says nothing of other sizes, the capture is for the
    call's own: other sizes are captured, and compared, by themselves.
    """
    examples = Examples(captured, model, args, kwargs, config)
    captured.guards = examples.guards
    return examples


def verified(executable: Executable, examples: Examples, config: Config, tuner: Tuner) -> Executable:
    """`executable`, less the rewrites that change an answer beyond the error budget; each is named in the findings."""
    captured, skip, wrong = executable.capture, frozenset[int](), list[tuple[str, Change]]()
    tried = dict[int, Findings]()

    def verdict_with(limit: int) -> Verdict:
        limited = rewrite(captured, config, Fuel(limit, skip), tuner)
        tried[limit] = limited.findings
        return examples.verdict(limited)

    while not (verdict := examples.verdict(executable)).ok:
        if not verdict.capture_ok or not verdict_with(0).ok:
            raise (CaptureError if examples.served else OtherData)(verdict.message)  # no rewrite is to blame
        tried[executable.findings.rewrites] = executable.findings
        number = bisect(verdict_with, executable.findings.rewrites)
        if number < 0 or number in skip:
            raise CaptureError(verdict.message)  # the same graph is right at one time and wrong at another
        # A trial that is close may end otherwise each time: the rewrite is named where it was seen to be wrong.
        wrong += [(name, replace(change, why=verdict.message)) for name, change in tried[number + 1].blame(number)]
        skip |= {number}
        executable = rewrite(captured, config, Fuel(config.max_rewrites, skip), tuner)
    for ran in executable.findings.passes:
        ran.rolled_back.extend(change for name, change in wrong if name == ran.name)
    executable.findings.max_error = verdict.max_error
    executable.findings.witness, executable.findings.untold = examples.witness, examples.untold
    return executable


def raced(
    executable: Executable,
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    examples: Examples,
    config: Config,
    tuner: Tuner,
) -> Executable:
    """`executable`, less the passes that made the whole slower than it was captured; each is named in the findings."""
    captured = executable.capture

    def less(names: Sequence[str]) -> Config:
        return replace(config, disable=(*config.disable, *names))

    def without(names: Sequence[str]) -> Executable:
        return rewrite(captured, less(names), Fuel(), tuner)

    if not may_be_raced(executable, config, tuner):
        return executable
    before = copied(captured.graph)
    inference, replays = records_nothing(captured.graph.graph), replayable(executable, config.cuda_graphs)
    direct(before, inference, states=len(captured.state))
    race = Race(captured, model, args, kwargs, before.forward, tuner, replays, training=not inference)
    slow = slower_passes(executable, race, without)
    if slow:
        names = [ran.name for ran in slow]
        executable = verified(without(names), examples, less(names), tuner)
        executable.findings.passes += slow
    return executable


def take_turns(executable: Executable, config: Config, tuner: Tuner) -> None:
    """Calls themselves tell whether a graph around opaque submodules pays."""
    if takes_turns(executable, config, tuner):
        executable.turns = Turns(executable.findings)


def take_pieces(
    executable: Executable, examples: Examples, config: Config, optimize: Callable[[nn.Module], nn.Module]
) -> None:
    """Opaque leaves run with those of their submodules optimized that can be, unless that changes the answer."""
    modules = executable.graph.modules() if executable.graph is not None else ()
    calls = [module for module in modules if isinstance(module, LeafCall)]
    for call in calls:
        if call.path not in config.leaves:
            call.pieces = Pieces(call.module, optimize) or None
    if config.verify == "off" or not any(call.pieces for call in calls):
        return
    if not examples.verdict(executable).ok:
        for call in calls:
            call.pieces = None


def lowered(executable: Executable, examples: Examples) -> Executable:
    """`executable` with its islands compiled, or as it is where that fails or changes the answer; the findings say."""
    from fxopt.lowering import NotLowered, lower  # Inductor takes a second to import

    findings = PassFindings("lowering")
    executable.findings.passes.append(findings)
    try:
        candidate, what = lower(executable, records_nothing(executable.capture.graph.graph))
        verdict = examples.verdict(candidate)
    except NotLowered as error:
        findings.misses.append(Miss("lowering", str(error), Place()))
        return executable
    change = Change(executable.findings.rewrites, "", what, "compared with eager after compiling", Place())
    if not verdict.ok:
        findings.rolled_back.append(replace(change, why=verdict.message))
        return executable
    findings.changes.append(change)
    return candidate


def signature_of(captured: Capture) -> str:
    """The inputs as a person writes them: "float32[s0, 13], int64[s0, 26]"."""
    return ", ".join(
        f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.dims))}]" for spec in captured.inputs
    )


def operators(graph: Graph) -> int:
    """Calls of operators per forward, those of packed functions too; sizes and list items are free."""
    return sum(map(calls_of, graph.nodes))
