"""Submodules that stay opaque: how their calls enter the graph, and how their output sizes are known.

The real model runs on a copy, on the example and (if it accepts that) on the example twice over, and `trial` records
what each leaf returned. (Not twice over on a GPU, where what it does not accept may end the process: an assertion on
the device.) An output dim that equals an input dim of the same leaf in both runs is taken to follow it. Any other
that differs between the two is a size of its own, and the rest are static. That is an assumption, so `LeafCall` checks
it at every call and raises `LeafMismatch` before anything depends on it: the caller then runs the eager model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxopt import trees
from fxopt.autocast import Autocast, autocast_state
from fxopt.capture.effects import make_write_first
from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import CONSTANTS
from fxopt.capture.state import HOOKS, ModelCopy, StateSlot
from fxopt.capture.untouched import Look, looked
from fxopt.findings import Place
from fxopt.reach import Code, held_by
from fxopt.shape.conditions import OtherSizes
from fxopt.torch_internals.fake_tensors import FakeTensorMode
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
        own = iter([size for size, dim in zip(value.shape, self.dims, strict=True) if dim is None])
        return value.shape == self.sizes(arguments, lambda: next(own))

    def sizes(self, arguments: Sequence[Any], own: Callable[[], Any]) -> tuple[Any, ...]:
        """own: gives each size that is no argument's."""
        return tuple(
            own() if d is None else d if isinstance(d, int) else arguments[d[0]].shape[d[1]] for d in self.dims
        )


@dataclass(frozen=True)
class Signature:
    """Structure of one call of a leaf: what goes in and what comes out, flattened.

    edits: whether it writes to its arguments; state: what it writes to of the model's; touched: what it
    leaves with another value, tensors and attributes, as (path of the module, name).
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outputs: tuple[Output, ...]
    edits: bool = False
    state: frozenset[StateSlot] = frozenset()
    touched: frozenset[tuple[str, str]] = frozenset()


class LeafCall(nn.Module):
    """One call of a leaf in a graph: flat leaves in, flat tuple out. `module` is the model's own object.

    Attributes:
        _autocast: as it is where the call is recorded.
        pieces: does the same with parts of the module optimized, None where it runs as it is.
    """

    _is_impure = True  # never dead code: the module may count, print, or update its buffers
    stand_in: Callable[..., Any] | None = None  # what runs instead for the time of a look

    def __init__(self, module: nn.Module, path: str, signature: Signature):
        super().__init__()
        self._autocast = Autocast(autocast_state())
        self.module = module
        self.path = path
        self.signature = signature
        self.pieces: Callable[..., Any] | None = None

    def forward(self, *flat: Any) -> tuple:
        args, kwargs = trees.unflatten(flat, self.signature.in_spec)
        run = self.stand_in if self.stand_in is not None else self.pieces or self.module  # one of no parts is false
        with self._autocast:
            values, spec = trees.flatten(run(*args, **kwargs))
        expected = self.signature.outputs
        if spec != self.signature.out_spec or not all(o.fits(v, flat) for o, v in zip(expected, values, strict=True)):
            raise LeafMismatch(f"{self.path}: expected {expected}, found {[getattr(v, 'shape', v) for v in values]}")
        return tuple(values)


@dataclass(frozen=True)
class Trial:
    """calls: leaf path to the signature of each of its calls, in order; assigns: attributes set inside leaves; edits:
    state whose memory leaves write to.
    """

    calls: dict[str, list[Signature]] = field(default_factory=dict)
    assigns: dict[str, set[str]] = field(default_factory=dict)
    edits: set[StateSlot] = field(default_factory=set)

    def within_leaf(self, path: str) -> bool:
        return any(path == leaf or path.startswith(leaf + ".") for leaf in self.calls)


@dataclass(frozen=True)
class _Record:
    """One call in a trial run."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    arguments: list[Any]
    values: list[Any]
    edits: bool
    state: frozenset[StateSlot]


def trial(model: nn.Module, leaves: set[str], args: tuple, kwargs: dict) -> Trial:
    """Run a copy of the model on real inputs and watch its leaves. The model's own errors pass through."""
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):  # tensors of inference mode count no versions
        once = _Run(model, leaves, args, kwargs)
        again: dict[str, list[_Record]] = {}
        if leaves and all(tensor.device.type == "cpu" for tensor in _tensors(model, args, kwargs)):
            with contextlib.suppress(Exception):  # offsets cannot be doubled, for one: the first run has to do
                twice = trees.map_only(torch.Tensor, lambda t: torch.cat([t, t]) if t.ndim else t, (args, kwargs))
                again = _Run(model, leaves, *twice).records
    assigned = frozenset((path, name) for path, names in once.assigns.items() for name in names)
    found = Trial({p: _signatures(calls, again.get(p, []), assigned) for p, calls in once.records.items()})
    found.assigns.update((path, names) for path, names in once.assigns.items() if found.within_leaf(path))
    found.edits.update(slot for calls in once.records.values() for call in calls for slot in call.state)
    return found


def _tensors(model: nn.Module, *inputs: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in trees.leaves(inputs) if isinstance(leaf, torch.Tensor))


class _Run:
    """A look at the model: records of each leaf's calls, and what was assigned."""

    def __init__(self, model: nn.Module, leaves: set[str], args: tuple, kwargs: dict):
        self._look = Look()
        self._copy = copy = self._look.copy(model)
        self.records: dict[str, list[_Record]] = {path: [] for path in leaves}
        replaced = []
        for path in leaves:
            attributes = copy.at(path).__dict__
            replaced.append((attributes, attributes.get("forward")))
            attributes["forward"] = self._recording(copy.at(path).forward, self.records[path])
        args, kwargs = self._look.own_inputs((args, kwargs))
        looked(self._look, copy.root, *args, **kwargs)
        for attributes, forward in replaced:
            attributes.pop("forward")
            attributes.update({"forward": forward} if forward else {})
        self.assigns = copy.changed_attributes()

    def _recording(self, forward: Callable, records: list[_Record]) -> Callable:
        def record(*args: Any, **kwargs: Any) -> Any:
            arguments, in_spec = trees.flatten((args, kwargs))
            start = len(self._look.log)
            result = forward(*args, **kwargs)
            values, out_spec = trees.flatten(result)
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            edits = any(self._look.writes(tensor, start) for tensor in tensors)
            state = frozenset(slot for slot, _, own in self._copy.state if self._look.writes(own, start))
            records.append(_Record(in_spec, out_spec, arguments, values, edits, state))
            return result

        return record


def _signatures(calls: list[_Record], again: list[_Record], assigned: frozenset[tuple[str, str]]) -> list[Signature]:
    same = [(c.in_spec, c.out_spec) for c in calls] == [(c.in_spec, c.out_spec) for c in again]
    pairs = zip(calls, again, strict=True) if same else zip(calls, strict=True)
    return [
        Signature(
            runs[0].in_spec,
            runs[0].out_spec,
            tuple(_output(runs, i) for i in range(len(runs[0].values))),
            any(run.edits for run in runs),
            runs[0].state,
            frozenset((slot.module, slot.name) for slot in runs[0].state) | assigned,
        )
        for runs in pairs
    ]


def _output(runs: Sequence[_Record], index: int) -> Output:
    value = runs[0].values[index]
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, CONSTANTS):
            raise CaptureError(f"a leaf returns a {type(value).__qualname__}, which is no pytree of tensors")
        return Output(constant=value)
    dims = tuple(_dim(runs, index, d) for d in range(value.ndim))
    return Output(dtype=value.dtype, device=value.device, dims=dims)


def _dim(runs: Sequence[_Record], index: int, d: int) -> int | tuple[int, int] | None:
    sizes = [run.values[index].shape[d] for run in runs]
    if len(runs) > 1 and sizes[0] == sizes[1]:
        return sizes[0]
    follows = [
        (i, j)
        for i, argument in enumerate(runs[0].arguments)
        if isinstance(argument, torch.Tensor)
        for j in range(argument.ndim)
        if (len(runs) > 1 or (d == 0) == (j == 0)) and [run.arguments[i].shape[j] for run in runs] == sizes
    ]
    if not follows and (len(runs) > 1 or d == 0):
        return None
    return min(follows, key=lambda source: abs(source[1] - d), default=sizes[0])


def install(copy: ModelCopy, model: nn.Module, trial: Trial, tracer: Any, mode: FakeTensorMode) -> None:
    """Replace the forward of each leaf of the traced copy by one that records a call."""
    for path, signatures in trial.calls.items():
        stub = copy.at(path)
        for hooks in HOOKS:
            stub.__dict__[hooks] = type(stub.__dict__[hooks])()
        stub.__dict__["forward"] = _stub(model.get_submodule(path), path, iter(signatures), tracer, mode)
    for path, names in trial.assigns.items():  # the graph does not see what a leaf assigns: reading it must fail
        make_write_first(copy.at(path), path, names)


def share_memory(graph: torch.fx.GraphModule) -> None:
    """Of the memory that leaves hold, keep in mind what the graph reads as well."""
    read = {number for n in graph.graph.nodes if n.op in ("placeholder", "get_attr") for number in n.meta["memory"]}
    for node in graph.graph.find_nodes(op="call_module"):
        node.meta["memory"] = tuple(read.intersection(node.meta.get("memory", ())))


def _stub(module: nn.Module, path: str, signatures: Any, tracer: Any, mode: FakeTensorMode) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        flat, in_spec = trees.flatten((args, kwargs))
        signature = next(signatures, None)
        if signature is None or signature.in_spec != in_spec:
            raise CaptureError(f"{path} is called otherwise while tracing than with the example inputs")
        for value in flat:
            if not isinstance(value, (torch.Tensor, *CONSTANTS, *SYMBOLIC)):
                raise CaptureError(f"{path} takes a {type(value).__qualname__}, which is no pytree of tensors")
        name = f"leaf{len(list(tracer.root.children()))}"
        tracer.root.add_module(name, LeafCall(module, path, signature))
        arguments = tuple(tracer.unwrap_proxy(value) for value in flat)
        proxy = tracer.create_proxy("call_module", name, arguments, {})
        proxy.node.meta["edits"] = signature.edits
        code = Code.behind(module.modules())
        held = [v for v in held_by(module, *code.functions.values()) if isinstance(v, torch.Tensor)]
        proxy.node.meta["memory"] = tuple(number for tensor in held for number in tracer.memory.of(tensor))
        own: Any = mode.shape_env.create_unbacked_symint  # type: ignore[union-attr]
        with disable_proxy_modes_tracing(), mode:
            outputs = [
                o.constant if o.dtype is None else torch.empty(o.sizes(flat, own), dtype=o.dtype, device=o.device)
                for o in signature.outputs
            ]
        with no_function_modes():
            record(tuple(outputs), proxy, tracer)
        return trees.unflatten(outputs, signature.out_spec)

    return call
