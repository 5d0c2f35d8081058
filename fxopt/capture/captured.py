"""The one IR: what every front end produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from fxopt.autocast import State
from fxopt.capture.guards import Guards
from fxopt.capture.inputs import TensorSpec
from fxopt.capture.leaves import Leaf
from fxopt.capture.state import StateSlot
from fxopt.findings import Miss
from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.symbols import ShapeEnv

Read = tuple[torch.Tensor, int, torch.Tensor | None]  # its version, and its numbers where they are few


@dataclass
class Capture:
    """A model as a graph.

    graph: forward(*state, *inputs) -> flat tuple of outputs. meta["val"] on every node; meta["place"] on calls;
        meta["state"] (StateSlot) or meta["input"] (readable name) on placeholders, and what is true of the tensor that
        was given: meta["asks"], that it required a gradient, and meta["contiguous"].
    state: the parameters and buffers it reads; inputs: every tensor leaf of (args, kwargs); constants: the other
        leaves, (index, value), which the graph has baked in; in_spec, out_spec: pytree specs;
    firsts: for each input the place of the first one that was the same object;
    guards: what must hold of the inputs' sizes and layouts; leaves: submodules that stay opaque;
    autocast: what it was for the model. The graph says its casts, and runs without it;
    filled: attributes of the arguments that the forward assigns; out_spec is then that of (result, their values);
    read: tensors besides these whose numbers are taken for granted;
    fixed: where it makes numbers of sizes that have been others in earlier captures;
    taken: where it asks about data and has the first call's answer; refuted: whether too many calls had another one.
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
    firsts: tuple[int, ...]
    autocast: State | None = None
    filled: tuple[pytree.KeyPath, ...] = ()
    read: tuple[Read, ...] = ()
    fixed: tuple[Miss, ...] = ()
    taken: tuple[Miss, ...] = ()
    refuted: bool = False

    def state_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters and buffers that it reads, as they are now."""
        return [slot.read(model) for slot in self.state]
