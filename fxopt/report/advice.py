"""What a user can do: each piece of advice with what it may save at most, the largest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.findings import Place
from fxopt.normalize import records_nothing
from fxopt.report.census import CHECK, role_of
from fxopt.report.data import Advice, Measurement, Note, Pass
from fxopt.report.kinds import OPAQUE, is_lookup, is_operator, name_of
from fxopt.report.measure import Measured
from fxopt.report.own_time import OwnTimes
from fxopt.report.spending import BETWEEN
from fxopt.report.units import percent
from fxopt.runtime import Executable
from fxopt.tune.clock import fastest

_WORTH = 0.05  # of a call; less is no advice
_DOMINATES = 0.4  # of a call, in one product
_MOST = 8
_CHECKS = "dead_checks"  # the pass whose near misses are checks
_PATIENCE = 0.2  # seconds for timing one product in fewer bits


def advised(
    measured: Sequence[Measured], executable: Executable | None, passes: Sequence[Pass], leaves: Sequence[Note]
) -> tuple[Advice, ...]:
    """Advice for the largest batch size that was measured."""
    last = max(measured, key=lambda each: each.measurement.batch, default=None)
    if last is None or last.after is None or executable is None or not last.measurement.optimized:
        return ()
    found = last.measurement
    every = [
        *_opaque(leaves, found),
        *_checks(last.after, passes, found),
        *_near_misses(passes, found),
        *_graphs(executable, found),
        *_fewer_bits(executable, last.after, found),
    ]
    one_each = {each.place.line or each.text: each for each in reversed(every)}.values()  # of a line, the first
    worth = [each for each in one_each if each.gain is None or each.gain >= _WORTH * (found.optimized or math.inf)]
    if found.distrust:
        worth = [replace(each, gain=None) for each in worth]
    return tuple(sorted(worth, key=lambda each: -(each.gain or 0.0))[:_MOST])


def _checks(after: OwnTimes, passes: Sequence[Pass], found: Measurement) -> Iterator[Advice]:
    """Checks of ids that are left: what is proven goes, and so do they."""
    reasons = {note.first: note.text for each in passes if each.name == _CHECKS for note in each.misses}
    by_place: dict[Place, list[Node]] = {}
    for node in after.seconds:
        if is_operator(node) and role_of(node) == CHECK:
            by_place.setdefault(node.meta.get("place", Place()), []).append(node)
    for place, nodes in by_place.items():
        names = " and ".join(dict.fromkeys(map(name_of, nodes)))
        why = reasons.get(place, "nothing proves it superfluous")
        text = f"pass ids that are in range already, and leave out the check ({names}): {why}"
        yield Advice(text, sum(after.seconds[node] for node in nodes), found.batch, place)


def _near_misses(passes: Sequence[Pass], found: Measurement) -> Iterator[Advice]:
    for each in passes:
        for note in each.misses:
            if note.stake is not None and not note.text.startswith("it would be"):
                yield Advice(f"{each.name} did not match: {note.text}", note.stake, found.batch, note.first)


def _opaque(leaves: Sequence[Note], found: Measurement) -> Iterator[Advice]:
    spent = next((each.after for each in found.spending if each.kind == OPAQUE), None)
    for leaf in leaves:
        yield Advice(f"this submodule could not be captured: {leaf.text}", spent, found.batch, leaf.first)


def _graphs(executable: Executable, found: Measurement) -> Iterator[Advice]:
    """Replaying costs no launches: what lies between operators goes."""
    between = next((each.after for each in found.spending if each.kind == BETWEEN), None)
    on_cuda = any(spec.device.type == "cuda" for spec in executable.capture.inputs)
    if executable.findings.graphs.startswith("no CUDA graphs"):
        yield Advice(f"{executable.findings.graphs}; replaying would save the launches", between, found.batch)
    elif on_cuda and not executable.findings.graphs:
        yield Advice("Config(cuda_graphs='auto') replays the whole call as one graph", between, found.batch)


@torch.no_grad()
def _fewer_bits(executable: Executable, after: OwnTimes, found: Measurement) -> Iterator[Advice]:
    """The product that dominates, timed with its weight in bf16 on random rows."""
    narrowed = any(ran.name.startswith("compressed_") and ran.changes for ran in executable.findings.passes)
    if narrowed or not records_nothing(executable.capture.graph.graph):  # fewer bits serve inference alone
        return
    assert found.optimized
    node = max(after.seconds, key=after.seconds.__getitem__, default=None)
    weight = _largest_weight(node) if node is not None else None
    if node is None or weight is None or after.seconds[node] < _DOMINATES * found.optimized:
        return
    rows, small = torch.randn(max(1, found.batch), weight.shape[1], device=weight.device), weight.bfloat16()
    whole, narrow = (lambda: rows @ weight.t()), (lambda: (rows.bfloat16() @ small.t()).float())
    before, now = fastest([whole, narrow], _PATIENCE)
    error = ((narrow() - whole()).abs().max() / whole().abs().max()).item()
    share = percent(min(1.0, after.seconds[node] / found.optimized))
    text = (
        f'Config(precision="bf16"): {share} of a call are in one operator with a weight of {list(weight.shape)}; '
        f"a product with it in bf16 differs by {error:.1g} of its largest value"
    )
    yield Advice(text, after.seconds[node] * (1 - now / before), found.batch)


def _largest_weight(node: Node) -> Tensor | None:
    """Of the fp32 matrices of the model that it reads; None for lookups, which read tables."""
    states = [read for read in node.all_input_nodes if "state" in read.meta and not is_lookup(node)]
    tensors = [tensor for read in states if (tensor := read.meta.get("tensor", lambda: None)()) is not None]
    weights = [tensor for tensor in tensors if tensor.dim() == 2 and tensor.dtype == torch.float32]
    return max(weights, key=Tensor.numel, default=None)
