"""Attributes that a forward assigns (`self.scores = softmax(...)`), kept as nodes at the end of the graph.

Only if the forward never reads the value of the last call: while tracing, such an attribute is write-only until it is
written, so a counter, a cache or a moving average in plain Python stops the capture instead of being baked in.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxopt import trees
from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import CONSTANTS
from fxopt.findings import Place
from fxopt.torch_internals.modes import no_function_modes
from fxopt.torch_internals.tracing import SYMBOLIC

_PLAIN = (str, bytes, int, float, complex, tuple, list, dict)
Attributes = dict[str, set[str]]  # module path to attribute names


class StoreAttribute(nn.Module):
    """setattr(module, name, value), the value's flat leaves being the arguments; `held` instead, until it is released.

    Attributes:
        asked: whether the forward looks at the buffer that it replaces.
        held: what was last to be stored while the graph was only looked at.
    """

    _is_impure = True  # never dead code

    def __init__(self, module: nn.Module, name: str, spec: pytree.TreeSpec, asked: bool):
        super().__init__()
        self._target = (module,)  # in a tuple: no child of this one
        self.name = name
        self.spec = spec
        self.asked = asked
        self.held: Any = None
        self._released = False

    @property
    def module(self) -> nn.Module:
        return self._target[0]

    def release(self, module: nn.Module) -> None:
        """From now on each call stores, into this module."""
        self._target, self._released, self.held = (module,), True, None

    def forward(self, *flat: Any) -> None:
        value = trees.unflatten(flat, self.spec)
        if self._released:
            setattr(self.module, self.name, value)
        else:
            self.held = value


def stores_of(graph: nn.Module) -> Iterator[StoreAttribute]:
    """The stores of a captured graph."""
    return (child for child in graph.children() if isinstance(child, StoreAttribute))


class _WriteFirst:
    """A data descriptor that raises when the attribute is read before it was written."""

    def __init__(self, path: str, name: str):
        self._path, self._name = path, name

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self._name] = value
        module.__dict__["_written"] = module.__dict__.get("_written", frozenset()) | {self._name}

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return self
        if self._name not in module.__dict__.get("_written", ()):
            raise _read_first(self._path, self._name)
        return module.__dict__[self._name]


class _Buffers(dict):
    """Buffers of which some are assigned. A tensor may be read before that, since it comes from its placeholder, but
    None may not. `asked`: names of what was read."""

    def __init__(self, buffers: dict[str, Any], path: str, names: set[str]):
        super().__init__(buffers)
        self.asked = set[str]()
        self._path, self._pending = path, names & buffers.keys()

    def __setitem__(self, name: str, value: Any) -> None:
        self._pending.discard(name)
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name in self._pending:
            if value is None:
                raise _read_first(self._path, name)
            self.asked.add(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def settle(self, *names: str) -> None:
        """Of these, or of all, what is read from here on does not count."""
        self._pending -= set(names or self._pending)


def _read_first(path: str, name: str) -> CaptureError:
    return CaptureError(
        f"forward reads the attribute {name!r} of {path or 'the model'} and assigns it later: "
        "its value depends on earlier calls"
    )


def make_write_first(copy: nn.Module, path: str, names: set[str]) -> None:
    """Guard these attributes of a copied module."""
    kind, buffers = type(copy), _Buffers(copy._buffers, path, names)

    def register_buffer(module: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        buffers.settle(name)  # torch asks whether there is one
        kind.register_buffer(module, name, tensor, persistent)

    guards: dict[str, Any] = {name: _WriteFirst(path, name) for name in names if name not in buffers}
    copy.__class__ = type(kind.__name__, (kind,), guards | {"register_buffer": register_buffer})
    vars(copy)["_buffers"] = buffers


def record(copy: nn.Module, module: nn.Module, path: str, name: str, tracer: Any) -> None:
    """Add the node that stores the attribute's traced value into the real module."""
    buffers: Any = copy._buffers
    buffers.settle()
    flat, spec = trees.flatten(getattr(copy, name))
    demand_plain(flat, f"assigns to its attribute {name!r}")
    for value in flat:
        if not isinstance(value, (torch.Tensor, *CONSTANTS, *SYMBOLIC)):
            raise CaptureError(f"forward assigns a {type(value).__qualname__} to its attribute {name!r}", Place(path))
    proxy = tracer.opaque_call("store", StoreAttribute(module, name, spec, name in buffers.asked), flat)
    proxy.node.meta["val"] = None


def demand_plain(values: Sequence[Any], what: str) -> None:
    """Refuse a number, text or container of a class of its own, of which a graph would make a plain one."""
    for value in values:
        if isinstance(value, _PLAIN) and type(value) not in (*_PLAIN, bool) and not isinstance(value, enum.Enum):
            raise CaptureError(f"{what} a {type(value).__qualname__}, whose class a graph would not keep")


def demand_results(results: Any, tracer: Any) -> None:
    """Refuse to return what is compared with nothing, or holds tensors where nobody can look."""
    for path, value in trees.flatten_with_path(results)[0]:
        where = f"output {pytree.keystr(path)}".rstrip()
        if isinstance(value, torch.Tensor):
            with no_function_modes():  # no question of the forward's
                layout = value.layout
            if layout is not torch.strided:
                hint = "return its parts, such as indices and values"
                raise CaptureError(f"{where}: expected a plain strided tensor, found one of {layout} ({hint})")
        elif not isinstance(value, SYMBOLIC):
            try:
                tracer.create_arg(value)
            except NotImplementedError:
                found = trees.unread(value)
                raise CaptureError(f"{where}: expected tensors, constants or pytrees, found {found}") from None


def filled_arguments(
    before: tuple[list, Any], after: tuple[list[tuple[pytree.KeyPath, Any]], Any]
) -> list[pytree.KeyPath]:
    """The attributes of arguments that were None and hold a tensor now (a KeyedJaggedTensor keeps its offsets).

    Any other change is refused: a graph puts nothing into its caller's dicts, and takes nothing out of them.
    """
    pairs = list(zip(before[0], after[0], strict=False))
    changed = [(old, path, new) for old, (path, new) in pairs if old is not new]
    caches = all(
        old is None and isinstance(new, torch.Tensor) and isinstance(path[-1], pytree.GetAttrKey)
        for old, path, new in changed
    )
    if before[1] == after[1] and caches:
        return [path for _, path, _ in changed]
    raise CaptureError("forward changes a dict, list or dataclass that it was given")
