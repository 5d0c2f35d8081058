"""Calls of a user's torch.autograd.Function: each becomes one call in the graph, which runs the function as it is.

A graph of what its forward computes would lose its backward. A capture runs the forward once, on fake tensors, for the
sizes of its results; a call checks these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt import trees
from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import CONSTANTS
from fxopt.capture.leaves import OpaqueCall, Output, Signature, record_outputs
from fxopt.capture.untouched import written
from fxopt.findings import Place
from fxopt.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from fxopt.torch_internals.known_sizes import expressions
from fxopt.torch_internals.modes import no_function_modes
from fxopt.torch_internals.storage import storage_number
from fxopt.torch_internals.tracing import SYMBOLIC, disable_proxy_modes_tracing

if TYPE_CHECKING:
    from fxopt.capture.trace import Tracer


class FunctionCall(OpaqueCall):
    """One call of a function.

    Attributes:
        own_backward: tells those who do not import this module that backward is not the graph's.
        place: where it is called; reason: for the report.
    """

    own_backward = True

    def __init__(self, function: type[torch.autograd.Function], signature: Signature, place: Place) -> None:
        name = f"{function.__name__}.apply"
        super().__init__(name, signature)
        self.function = function
        self.place = place
        self.reason = f"{name} runs as it is, so that its backward is kept"

    def forward(self, *flat: Any) -> tuple:
        return self._called(self.function.apply, flat)


def recorded(tracer: Tracer, mode: FakeTensorMode, function: Any, apply: Callable[..., Any], *args: Any, **kwargs: Any):
    """What `function.apply(*args, **kwargs)` gives, as one call in the graph; `apply` is torch's own.

    Raises:
        CaptureError: a call of the same function later may do something else, or it edits memory.
    """
    name = f"{function.__name__}.apply"
    flat, in_spec = trees.flatten((args, kwargs))
    if not _is_found_by_name(function):
        raise CaptureError(f"{name}: a graph of the forward does not keep its backward, and the class is made anew")
    for value in flat:
        if not isinstance(value, (Tensor, *CONSTANTS, *SYMBOLIC)):
            raise CaptureError(f"{name} takes a {type(value).__qualname__}, which is no tree of tensors and constants")
    edits = _Edits()
    with disable_proxy_modes_tracing(), no_function_modes(), mode, edits:
        values, out_spec = trees.flatten(apply(*args, **kwargs))
    if edits.found:
        raise CaptureError(f"{name} edits memory that it has not made")
    for value in values:
        if not isinstance(value, (Tensor, *CONSTANTS)):
            raise CaptureError(f"{name} returns a {type(value).__qualname__}, which is no tree of tensors")
    signature = Signature(in_spec, out_spec, tuple(_output(value, flat) for value in values))
    proxy = tracer.opaque_call("function", FunctionCall(function, signature, tracer.here()), flat)
    record_outputs(values, proxy, tracer)
    return trees.unflatten(values, out_spec)


def _is_found_by_name(function: type) -> bool:
    """Whether the class is a module's, and so the same one at each call."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _output(value: Any, arguments: Sequence[Any]) -> Output:
    if not isinstance(value, Tensor):
        return Output(constant=value)
    known: dict[Any, tuple[int, int]] = {}
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            for dim, size in enumerate(expressions(argument.shape)):
                known.setdefault(size, (place, dim))
    sizes = zip(value.shape, expressions(value.shape), strict=True)
    dims = tuple(size if isinstance(size, int) else known.get(spelled) for size, spelled in sizes)
    return Output(dtype=value.dtype, device=value.device, dims=dims)


class _Edits(TorchDispatchMode):
    """found: whether an operator wrote to memory that none of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._made: dict[int, Tensor] = {}  # by storage; held, so that no number is given out again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_number(value) for value in pytree.tree_leaves((args, kwargs)) if _is_fake(value)}
        edited = written(func, args, kwargs or {}, _is_fake)
        self.found |= any(storage_number(tensor) not in self._made for tensor in edited)
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if _is_fake(value) and storage_number(value) not in given:
                self._made[storage_number(value)] = value
        return result


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.layout is torch.strided
