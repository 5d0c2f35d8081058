"""Capture an nn.Module: attempts with other hints, static dims and leaves until one trace stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt.capture.errors import CaptureError
from fxopt.capture.guards import Guards, guards_of
from fxopt.capture.inputs import Dim, FakeInputs, Inputs, Shapes, TensorSpec, flatten, trace_shapes
from fxopt.capture.leaves import Leaf
from fxopt.capture.places import Places
from fxopt.capture.state import ModelCopy, StateSlot, fake_state
from fxopt.capture.trace import trace
from fxopt.config import Config


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


def capture(model: nn.Module, args: tuple = (), kwargs: dict | None = None, config: Config = Config()) -> Capture:
    """Capture `model(*args, **kwargs)` for every batch size and every multi-hot length.

    Raises:
        CaptureError: the model stays eager for these inputs; names the line that stopped it.
    """
    inputs = flatten(args, kwargs or {})
    for shapes in trace_shapes(inputs.tensors):
        try:
            found = _attempt(model, inputs, shapes, set())
        except Exception as error:
            failure = error
            continue
        if found.guards.holds(inputs.tensors):
            return found
    raise failure


def _attempt(model: nn.Module, inputs: Inputs, shapes: Shapes, static: set[Dim]) -> Capture:
    fakes = FakeInputs(inputs, shapes, static)
    copy = ModelCopy(model, fake_state(fakes.fake_mode))
    out_spec: list[pytree.TreeSpec] = []

    def run() -> list[Any]:
        args, kwargs = inputs.unflatten(fakes.tensors)
        flat, spec = pytree.tree_flatten(copy.root(*args, **kwargs))
        out_spec.append(spec)
        return flat

    graph = trace(run, [new for _, _, new in copy.state] + fakes.tensors, fakes.fake_mode, Places(copy.paths))
    changed = copy.changed_attribute()
    if changed:
        raise CaptureError(f"forward assigns {changed[1]!r}")
    slots = _finish(graph, copy, inputs)
    fixed = {dim: int(inputs.tensors[dim[0]].shape[dim[1]]) for dim in static}
    return Capture(
        graph,
        tuple(slots),
        tuple(fakes.specs),
        inputs.constants,
        inputs.spec,
        out_spec[0],
        guards_of(fakes.shape_env, fakes.sources, fixed),
        (),
        fakes.fake_mode,
        fakes.shape_env,
    )


def _finish(gm: torch.fx.GraphModule, copy: ModelCopy, inputs: Inputs) -> list[StateSlot]:
    """Plain calling convention, constants that are state read from their placeholder, unused state dropped."""
    graph = gm.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    state_nodes = placeholders[: len(copy.state)]
    by_tensor = {id(real): node for (_, real, _), node in zip(copy.state, state_nodes)}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        slot_node = by_tensor.get(id(getattr(gm, node.target)))
        if slot_node is not None:
            node.replace_all_uses_with(slot_node)
            graph.erase_node(node)
    slots = []
    for node, (slot, _, _) in zip(state_nodes, copy.state):
        node.meta["state"] = slot
        if node.users:
            slots.append(slot)
        else:
            graph.erase_node(node)
    for node, name in zip(placeholders[len(copy.state) :], inputs.names):
        node.meta["input"] = name
    (output,) = (n for n in graph.nodes if n.op == "output")
    output.args = (tuple(output.args[0]),)
    _plain_constants(gm)
    gm.recompile()
    return slots


def _plain_constants(gm: torch.fx.GraphModule) -> None:
    """Constants are attributes, not buffers: they must not enter a state_dict, and not be moved or copied."""
    for store in (gm._parameters, gm._buffers):
        for name in list(store):
            gm.__dict__[name] = store.pop(name)
