"""Capture an nn.Module: attempts with other hints, static dims and leaves until one trace stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from fxopt.capture import leaves as opaque
from fxopt.capture.errors import CaptureError
from fxopt.capture.guards import Guards, guards_of
from fxopt.capture.inputs import Dim, FakeInputs, Inputs, Shapes, TensorSpec, flatten, trace_shapes
from fxopt.capture.leaves import Leaf, Signature
from fxopt.capture.packed import MakeStatic, PackedDims
from fxopt.capture.places import Places
from fxopt.capture.state import ModelCopy, StateSlot, fake_state, has_hooks
from fxopt.capture.trace import trace
from fxopt.config import Config
from fxopt.findings import Place

MAX_ROUNDS = 8  # each round marks the submodules that stopped the last one as leaves
_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException, CaptureError)


@dataclass
class Capture:
    """A model as a graph.

    graph: forward(*state, *inputs) -> flat tuple of outputs. meta["val"] on every node; meta["place"] on calls;
        meta["state"] (StateSlot) or meta["input"] (readable name) on placeholders.
    state: the parameters and buffers it reads; inputs: every tensor leaf of (args, kwargs); constants: the other
        leaves, (index, value), which the graph has baked in; in_spec, out_spec: pytree specs;
    guards: what must hold of the input sizes; leaves: submodules that stay opaque.
    """

    graph: torch.fx.GraphModule
    state: tuple[StateSlot, ...]
    inputs: tuple[TensorSpec, ...]
    constants: tuple[tuple[int, Any], ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    guards: Guards
    leaves: tuple[Leaf, ...]
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv


class _Stopped(Exception):
    """A trace failed at one module."""

    def __init__(self, found: dict[str, Leaf]):
        self.found = found


def capture(model: nn.Module, args: tuple = (), kwargs: dict | None = None, config: Config = Config()) -> Capture:
    """Capture `model(*args, **kwargs)` for every batch size and every multi-hot length.

    Submodules that cannot be captured (config.leaves, hooks, TorchScript, data-dependent Python, attributes assigned in
    forward) become leaves.

    Raises:
        CaptureError: the model itself cannot be captured; names the line that stopped it.
        Exception: what the model raises for these inputs in eager mode.
    """
    kwargs = kwargs or {}
    inputs = flatten(args, kwargs)
    for device in {t.device.type for t in inputs.tensors}:
        if torch.is_autocast_enabled(device):
            raise CaptureError("autocast is on: capture outside of it")
    leaves = _known_leaves(model, config)
    for _ in range(MAX_ROUNDS):
        try:
            calls = opaque.trial(model, _outermost(leaves), args, kwargs) if leaves else {}
            return _capture(model, inputs, leaves, calls)
        except _Stopped as stop:
            leaves.update(stop.found)
            if "" in leaves:
                opaque.trial(model, set(), args, kwargs)  # inputs that do not fit: the model's own error is the better one
                raise CaptureError(leaves[""].reason, leaves[""].place) from stop.__cause__
    last = list(leaves.values())[-1]
    raise CaptureError(f"more than {MAX_ROUNDS} submodules stop the capture, the last one because: {last.reason}", last.place)


def _known_leaves(model: nn.Module, config: Config) -> dict[str, Leaf]:
    leaves = {}
    for path, module in model.named_modules():
        reason = (
            "named in Config.leaves" if path in config.leaves
            else "TorchScript" if isinstance(module, torch.jit.ScriptModule)
            else "has forward or backward hooks" if has_hooks(module)
            else ""
        )  # fmt: skip
        if reason:
            leaves[path] = Leaf(path, reason, Place(path))
    unknown = set(config.leaves) - leaves.keys()
    if unknown:
        raise ValueError(f"Config.leaves: expected paths of named_modules(), found {sorted(unknown)}")
    if "" in leaves:
        raise CaptureError(f"the model itself {leaves[''].reason}")
    return leaves


def _outermost(leaves: dict[str, Leaf]) -> set[str]:
    return {path for path in leaves if not any(path != p and path.startswith(p + ".") for p in leaves)}


def _capture(model: nn.Module, inputs: Inputs, leaves: dict[str, Leaf], calls: dict[str, list[Signature]]) -> Capture:
    """The first attempt whose guards hold for the example."""
    reason: _Stopped | None = None
    for shapes, static in _attempts(inputs):
        try:
            found = _settle(model, inputs, shapes, static, leaves, calls)
        except _Stopped as stop:
            reason = stop
            if isinstance(stop.__cause__, _DATA_DEPENDENT):
                break
            continue
        if found.guards.holds(inputs.tensors):
            return found
    raise reason or CaptureError("no graph found whose size conditions hold for these inputs")


def _attempts(inputs: Inputs) -> Iterator[tuple[Shapes, set[Dim]]]:
    inner = {(i, d) for i, t in enumerate(inputs.tensors) for d in range(1, t.ndim)}
    for shapes in trace_shapes(inputs.tensors):
        yield shapes, set()
        if inner:
            yield shapes, inner


def _settle(
    model: nn.Module,
    inputs: Inputs,
    shapes: Shapes,
    static: set[Dim],
    leaves: dict[str, Leaf],
    calls: dict[str, list[Signature]],
) -> Capture:
    """Trace, again with more static dims for as long as the trace asks for it."""
    while True:
        try:
            return _trace(model, inputs, shapes, static, leaves, calls)
        except MakeStatic as found:
            static = static | found.dims


def _trace(
    model: nn.Module,
    inputs: Inputs,
    shapes: Shapes,
    static: set[Dim],
    leaves: dict[str, Leaf],
    calls: dict[str, list[Signature]],
) -> Capture:
    fakes = FakeInputs(inputs, shapes, static)
    copy = ModelCopy(model, fake_state(fakes.fake_mode))
    places = Places({key: path for key, path in copy.paths.items() if path not in leaves})
    out_spec: list[pytree.TreeSpec] = []

    def run(tracer: Any) -> list[Any]:
        opaque.install(copy, model, calls, tracer, fakes.fake_mode)
        args, kwargs = inputs.unflatten(fakes.tensors)
        flat, spec = pytree.tree_flatten(copy.root(*args, **kwargs))
        out_spec.append(spec)
        return flat

    state = [(real, new) for _, real, new in copy.state]
    tensors = [new for _, new in state] + fakes.tensors
    reals = [real for real, _ in state] + [None] * len(fakes.tensors)
    try:
        graph = trace(run, tensors, reals, fakes.fake_mode, places, [PackedDims(fakes.sources)])
    except MakeStatic:
        raise
    except Exception as error:
        raise _stopped(error, places) from error
    changed = copy.changed_attributes(ignore=set(calls))
    if changed:
        raise _Stopped({p: Leaf(p, f"forward assigns its attribute {name!r}", Place(p)) for p, name in changed.items()})
    _demand_simple(fakes)
    fixed = {dim: int(inputs.tensors[dim[0]].shape[dim[1]]) for dim in static}
    return Capture(
        graph,
        _label(graph, [slot for slot, _, _ in copy.state], inputs.names),
        tuple(fakes.specs),
        inputs.constants,
        inputs.spec,
        out_spec[0],
        guards_of(fakes.shape_env, fakes.sources, fixed),
        tuple(leaf for path, leaf in leaves.items() if path in calls),
        fakes.fake_mode,
        fakes.shape_env,
    )


def _stopped(error: Exception, places: Places) -> _Stopped:
    path, place, source = places.of_error(error)
    what = str(error).strip().split("\n")[0] or type(error).__name__
    why = "depends on data" if isinstance(error, _DATA_DEPENDENT[:3]) else what
    reason = what if isinstance(error, CaptureError) else f"`{source}`: {why}" if source else why
    return _Stopped({path: Leaf(path, reason, place)})


def _demand_simple(fakes: FakeInputs) -> None:
    """Dims >= 1 under anything but plain comparisons are better static: layouts, not lengths."""
    complicated: set[str] = set()
    for guard in fakes.shape_env.guards:
        expr = guard.expr
        if not (isinstance(expr, sympy.core.relational.Relational) and all(a.is_Symbol or a.is_Number for a in expr.args)):
            complicated |= {str(s) for s in expr.free_symbols}
    dims = {dim for name in complicated for dim in fakes.sources.get(name, ()) if dim[1] >= 1}
    if dims:
        raise MakeStatic(dims)


def _label(gm: torch.fx.GraphModule, slots: list[StateSlot], names: tuple[str, ...]) -> tuple[StateSlot, ...]:
    """Tell placeholders apart, and drop those of unused state."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    used = []
    for node, slot in zip(placeholders, slots):
        node.meta["state"] = slot
        if node.users:
            used.append(slot)
        else:
            gm.graph.erase_node(node)
    for node, name in zip(placeholders[len(slots) :], names):
        node.meta["input"] = name
    gm.recompile()
    return tuple(used)
