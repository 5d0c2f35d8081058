"""Submodules that stay opaque: how their calls enter the graph, and how their output sizes are known.

The real model runs once, on a copy, and `LeafTrial` records what each leaf returned. An output dim that equals an input
dim of the same leaf is taken to follow it, any other is taken to be static. That is an assumption, so `LeafCall` checks
it at every call and raises `LeafMismatch` before anything depends on it: the caller then runs the eager model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import CONSTANTS
from fxopt.capture.state import ModelCopy
from fxopt.findings import Place


@dataclass(frozen=True)
class Leaf:
    """A submodule that runs as it is: its path, why, and the line that stopped the capture."""

    path: str
    reason: str
    place: Place


class LeafMismatch(RuntimeError):
    """A leaf returned another structure, dtype or size than its graph was captured for."""


@dataclass(frozen=True)
class Output:
    """One output leaf: a constant, or a tensor whose dims are a size or (argument leaf, dim)."""

    constant: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    dims: tuple[int | tuple[int, int], ...] = ()

    def fits(self, value: Any, arguments: list[Any]) -> bool:
        if self.dtype is None:
            return not isinstance(value, torch.Tensor) and bool(value == self.constant)
        return isinstance(value, torch.Tensor) and value.dtype == self.dtype and value.shape == self.sizes(arguments)

    def sizes(self, arguments: list[Any]) -> tuple[Any, ...]:
        return tuple(d if isinstance(d, int) else arguments[d[0]].shape[d[1]] for d in self.dims)


@dataclass(frozen=True)
class Signature:
    """Structure of one call of a leaf: what goes in and what comes out, flattened."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outputs: tuple[Output, ...]


class LeafCall(nn.Module):
    """One call of a leaf in a graph: flat leaves in, flat tuple out. `module` is the model's own object."""

    _is_impure = True  # never dead code: the module may count, print, or update its buffers

    def __init__(self, module: nn.Module, path: str, signature: Signature):
        super().__init__()
        self.module = module
        self.path = path
        self.signature = signature

    def forward(self, *flat: Any) -> tuple:
        args, kwargs = pytree.tree_unflatten(flat, self.signature.in_spec)
        values, spec = pytree.tree_flatten(self.module(*args, **kwargs))
        expected = self.signature.outputs
        if spec != self.signature.out_spec or not all(o.fits(v, flat) for o, v in zip(expected, values)):
            raise LeafMismatch(f"{self.path}: expected {expected}, found {[getattr(v, 'shape', v) for v in values]}")
        return tuple(values)


def trial(model: nn.Module, leaves: set[str], args: tuple, kwargs: dict) -> dict[str, list[Signature]]:
    """Run a copy of the model once on real inputs; the signature of each call of each leaf, in order.

    Buffers, inputs and the random state are cloned or restored. Errors of the model pass through.
    """
    copy = ModelCopy(model, lambda real, slot: real if slot.kind == "parameter" else real.clone())
    calls: dict[str, list[Signature]] = {path: [] for path in leaves}
    for path in leaves:
        leaf = copy.at(path)
        leaf.__dict__["forward"] = _recording(leaf.forward, calls[path])
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng():
        copy.root(*args, **kwargs)
    return calls


def _recording(forward: Callable, calls: list[Signature]) -> Callable:
    def record(*args: Any, **kwargs: Any) -> Any:
        flat, in_spec = pytree.tree_flatten((args, kwargs))
        result = forward(*args, **kwargs)
        values, out_spec = pytree.tree_flatten(result)
        calls.append(Signature(in_spec, out_spec, tuple(_output(value, flat) for value in values)))
        return result

    return record


def _output(value: Any, arguments: list[Any]) -> Output:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, CONSTANTS):
            raise CaptureError(f"returns a {type(value).__qualname__}, which is no pytree of tensors")
        return Output(constant=value)
    dims: list[int | tuple[int, int]] = []
    for d, size in enumerate(value.shape):
        same = [
            (i, j)
            for i, x in enumerate(arguments)
            if isinstance(x, torch.Tensor)
            for j, n in enumerate(x.shape)
            if n == size and (d == 0) == (j == 0)
        ]
        dims.append(min(same, key=lambda source: abs(source[1] - d), default=size))
    return Output(dtype=value.dtype, device=value.device, dims=tuple(dims))


def install(copy: ModelCopy, model: nn.Module, calls: dict[str, list[Signature]], tracer: Any, mode: FakeTensorMode) -> None:
    """Replace the forward of each leaf of the traced copy by one that records a call."""
    for path, signatures in calls.items():
        stub = copy.at(path)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            stub.__dict__[hooks] = type(stub.__dict__[hooks])()
        stub.__dict__["forward"] = _stub(model.get_submodule(path), path, iter(signatures), tracer, mode)


def _stub(module: nn.Module, path: str, signatures: Any, tracer: Any, mode: FakeTensorMode) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        flat, in_spec = pytree.tree_flatten((args, kwargs))
        signature = next(signatures, None)
        if signature is None or signature.in_spec != in_spec:
            raise CaptureError(f"{path} is called otherwise while tracing than with the example inputs")
        for value in flat:
            if not isinstance(value, (torch.Tensor, *CONSTANTS, *proxy_tensor.py_sym_types)):
                raise CaptureError(f"{path} takes a {type(value).__qualname__}, which is no pytree of tensors")
        name = f"leaf{len(list(tracer.root.children()))}"
        tracer.root.add_module(name, LeafCall(module, path, signature))
        arguments = tuple(tracer.unwrap_proxy(value) for value in flat)
        proxy = tracer.create_proxy("call_module", name, arguments, {})
        with proxy_tensor.disable_proxy_modes_tracing(), mode:
            outputs = [
                o.constant if o.dtype is None else torch.empty(o.sizes(flat), dtype=o.dtype, device=o.device)
                for o in signature.outputs
            ]
        proxy_tensor.track_tensor_tree(tuple(outputs), proxy, constant=None, tracer=tracer)
        return pytree.tree_unflatten(outputs, signature.out_spec)

    return call
