"""Submodules that stay opaque: how their calls enter the graph, and how their output sizes are known.

What a trial run (trial.py) tells of those is an assumption, so `LeafCall` checks it at every call and raises
`LeafMismatch` before anything depends on it: the caller then runs the eager model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxopt import trees
from fxopt.autocast import Autocast, autocast_state
from fxopt.capture.boundaries import demand_unchanged, forbid
from fxopt.capture.effects import Attributes
from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import CONSTANTS
from fxopt.capture.state import ModelCopy, StateSlot, hooks_of
from fxopt.findings import Place
from fxopt.reach.code import Code
from fxopt.reach.held import held_by
from fxopt.shape.conditions import OtherSizes
from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.hooks import HOOKS
from fxopt.torch_internals.modes import no_function_modes
from fxopt.torch_internals.tracing import SYMBOLIC, disable_proxy_modes_tracing, record


@dataclass(frozen=True)
class Leaf:
    """A submodule that runs as it is: its path, why, and the line that stopped the capture."""

    path: str
    reason: str
    place: Place


class LeafMismatch(OtherSizes):
    """A leaf returned another structure, dtype or size than its graph was captured for."""


@dataclass(frozen=True)
class Output:
    """One output leaf: a constant, or a tensor whose dims are a size, (argument leaf, dim), or None: any size."""

    constant: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    dims: tuple[int | tuple[int, int] | None, ...] = ()

    def fits(self, value: Any, arguments: Sequence[Any]) -> bool:
        if self.dtype is None:
            return not isinstance(value, torch.Tensor) and bool(value == self.constant)
        if not isinstance(value, torch.Tensor) or value.dtype != self.dtype or value.ndim != len(self.dims):
            return False
        for size, dim in zip(value.shape, self.dims, strict=True):
            if dim is not None and size != _size(dim, arguments):
                return False
        return True

    def sizes(self, arguments: Sequence[Any], own: Callable[[], Any]) -> tuple[Any, ...]:
        """own: gives each size that is no argument's."""
        return tuple(own() if dim is None else _size(dim, arguments) for dim in self.dims)


def _size(dim: int | tuple[int, int], arguments: Sequence[Any]) -> Any:
    return dim if isinstance(dim, int) else arguments[dim[0]].shape[dim[1]]


@dataclass(frozen=True)
class Signature:
    """Structure of one call of a leaf: what goes in and what comes out, flattened.

    edits: whether it writes to its arguments; state: what it writes to of the model's; touched: what it
    leaves with another value, tensors and attributes, as (path of the module, name); outside: what it changes
    outside of the model, "" if nothing was seen.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outputs: tuple[Output, ...]
    edits: bool = False
    state: frozenset[StateSlot] = frozenset()
    touched: frozenset[tuple[str, str]] = frozenset()
    outside: str = ""


class OpaqueCall(nn.Module):
    """One call in a graph of what runs as it is: flat leaves in, flat tuple out.

    Attributes:
        _autocast: as it is where the call is recorded.
    """

    _is_impure = True  # never dead code: it may count, print, or update buffers

    def __init__(self, name: str, signature: Signature) -> None:
        super().__init__()
        self._autocast = Autocast(autocast_state())
        self._name, self._expected = name, signature
        self._arguments, self._gives_one = trees.arguments_from(signature.in_spec), signature.out_spec.is_leaf()

    def _called(self, run: Callable[..., Any], flat: Sequence[Any]) -> tuple:
        """What `run` gives; raises LeafMismatch where that is not as expected."""
        args, kwargs = self._arguments(flat)
        with self._autocast:
            result = run(*args, **kwargs)
        one = self._gives_one and isinstance(result, torch.Tensor)
        values, spec = ([result], self._expected.out_spec) if one else trees.flatten(result)
        expected = self._expected.outputs
        if spec != self._expected.out_spec or not all(o.fits(v, flat) for o, v in zip(expected, values, strict=True)):
            raise LeafMismatch(f"{self._name}: expected {expected}, found {[getattr(v, 'shape', v) for v in values]}")
        return tuple(values)


class LeafCall(OpaqueCall):
    """That of a leaf. `module` is the model's own object.

    Attributes:
        pieces: does the same with parts of the module optimized, None where it runs as it is.
    """

    stand_in: Callable[..., Any] | None = None  # what runs instead for the time of a look

    def __init__(self, module: nn.Module, path: str, signature: Signature):
        super().__init__(path, signature)
        self.module = module
        self.path = path
        self.signature = signature
        self.pieces: Callable[..., Any] | None = None

    def forward(self, *flat: Any) -> tuple:
        run = self.stand_in if self.stand_in is not None else self.pieces or self.module  # one of no parts is false
        return self._called(run, flat)


@dataclass(frozen=True)
class Trial:
    """calls: leaf path to the signature of each of its calls, in order; changes: attributes that leaves change, by the
    path of the module; edits: state whose memory leaves write to.
    """

    calls: dict[str, list[Signature]] = field(default_factory=dict)
    changes: Attributes = field(default_factory=dict)
    edits: set[StateSlot] = field(default_factory=set)

    def within_leaf(self, path: str) -> bool:
        return any(path == leaf or path.startswith(leaf + ".") for leaf in self.calls)


def install(copy: ModelCopy, model: nn.Module, trial: Trial, tracer: Any, mode: FakeTensorMode) -> None:
    """Replace the forward of each leaf of the traced copy by one that records a call."""
    for path, signatures in trial.calls.items():
        stub = copy.at(path)
        for hooks in HOOKS:
            stub.__dict__[hooks] = type(stub.__dict__[hooks])()
        stub.__dict__["forward"] = _stub(copy, model, path, iter(signatures), tracer, mode)
    for path, names in trial.changes.items():
        forbid(copy.at(path), path, names)


def share_memory(graph: torch.fx.GraphModule) -> None:
    """Of the memory that leaves hold, keep in mind what the graph reads as well."""
    read = {number for n in graph.graph.nodes if n.op in ("placeholder", "get_attr") for number in n.meta["memory"]}
    for node in graph.graph.find_nodes(op="call_module"):
        node.meta["memory"] = tuple(read.intersection(node.meta.get("memory", ())))


def record_outputs(values: Sequence[Any], proxy: Any, tracer: Any) -> None:
    """Of a call that stays as it is: tensors come from it from now on. Constants are Python's, names among them."""
    with no_function_modes():
        record(tuple(value if isinstance(value, torch.Tensor) else None for value in values), proxy, tracer)


def _stub(copy: ModelCopy, model: nn.Module, path: str, signatures: Any, tracer: Any, mode: FakeTensorMode) -> Callable:
    module, tree = model.get_submodule(path), set(copy.originals.values())
    within = list(module.modules())
    code = Code.behind([*within, *hooks_of(within)])
    held = [v for v in held_by(module, *code.functions.values()) if isinstance(v, torch.Tensor)]
    read = [v for v in code.held if isinstance(v, nn.Module) and v in tree]

    def call(*args: Any, **kwargs: Any) -> Any:
        flat, in_spec = trees.flatten((args, kwargs))
        signature = next(signatures, None)
        if signature is None or signature.in_spec != in_spec:
            raise CaptureError(f"{path} is called otherwise while tracing than with the example inputs")
        for value in flat:
            if not isinstance(value, (torch.Tensor, *CONSTANTS, *SYMBOLIC)):
                raise CaptureError(f"{path} takes a {type(value).__qualname__}, which is no pytree of tensors")
        demand_unchanged(copy, path, read)
        proxy = tracer.opaque_call("leaf", LeafCall(module, path, signature), flat)
        proxy.node.meta["edits"] = signature.edits
        proxy.node.meta["memory"] = tuple(number for tensor in held for number in tracer.memory.of(tensor))
        own: Any = mode.shape_env.create_unbacked_symint  # type: ignore[union-attr]
        with disable_proxy_modes_tracing(), mode:
            outputs = [
                o.constant if o.dtype is None else torch.empty(o.sizes(flat, own), dtype=o.dtype, device=o.device)
                for o in signature.outputs
            ]
        record_outputs(outputs, proxy, tracer)
        return trees.unflatten(outputs, signature.out_spec)

    return call
