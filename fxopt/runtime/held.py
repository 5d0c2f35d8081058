"""What tensors, modules, containers and objects hold at one moment, so that it can be put back."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.reach.containers import is_long, too_large
from fxopt.reach.entries import Fields
from fxopt.runtime.unchanged import Unchanged
from fxopt.torch_internals.storage import set_version

MOST = 1 << 22  # bytes: 0.2 ms a call
_LITTLE = 1 << 12  # bytes of a tensor that nobody misses before the next call
_ORDERED = (dict, OrderedDict, set, deque)  # whose iteration is Python's own
CONSTANTS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


@contextlib.contextmanager
def nothing_left_in(touched: Mapping[nn.Module, set[str]]) -> Iterator[None]:
    """What is changed of these attributes meanwhile is put back."""
    held = Attributes(touched).now()
    try:
        yield
    finally:
        held.put_back()


class Kept:
    """Tensors, and their values and versions as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._values = [(tensor.detach() if tensor.requires_grad else tensor).clone() for tensor in tensors]
        self._versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]

    def put_back(self) -> None:
        for tensor, value, version in zip(self._tensors, self._values, self._versions, strict=True):
            with torch.inference_mode(version is None), torch.no_grad():
                tensor.data.copy_(value)
            if version is not None:
                set_version(tensor, version)


class Attributes:
    """What modules hold, at these names down to what containers and objects hold."""

    def __init__(self, touched: Mapping[nn.Module, set[str]]) -> None:
        self._touched = touched
        self._inside = _Inside(())

    def now(self) -> _Now:
        """As of now. Most calls find what is inside as it was: to go through 70 containers took a third of a call of
        PyTorch Geometric's GAT."""
        own = [(module, dict(vars(module))) for module in self._touched]
        named = [held.get(name) for (_, held), names in zip(own, self._touched.values(), strict=True) for name in names]
        behind = [value for value in named if type(value) not in CONSTANTS]
        inside = self._inside
        if not inside.holds(behind):
            inside = _Inside(behind)
            self._inside = inside if inside.is_light else _Inside(())
        return _Now(own, inside)


class _Now:
    """What modules hold, by reference, and all tensors by value."""

    def __init__(self, own: list[tuple[nn.Module, dict[str, Any]]], inside: _Inside) -> None:
        from fxopt.capture.reach import content

        self._own, self._contents = own, inside.contents
        self._memory = [(value, content(value)) for value in inside.memory]
        tensors = {id(value): value for _, held in own for value in held.values() if isinstance(value, Tensor)}
        tensors |= inside.tensors
        self._tensors = Kept([tensor for tensor in tensors.values() if _is_kept(tensor)])

    def put_back(self) -> None:
        from fxopt.capture.reach import refill

        for value, held in (*self._contents, *self._memory):
            refill(value, held)
        for module, attributes in self._own:
            refill(vars(module), attributes)
        self._tensors.put_back()


class _Inside:
    """What is behind values.

    Attributes:
        contents: containers and objects, and what each holds.
        memory: what holds numbers, and nobody knows whether it still does.
    """

    def __init__(self, behind: Sequence[Any]) -> None:
        self._behind = behind
        self.contents: list[tuple[Any, Any]] = []
        self.memory: list[Any] = []
        self.tensors: dict[int, Tensor] = {}
        self._values: list[tuple[Any, Any, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._orders: list[tuple[Any, list]] = []
        self._is_known = True  # whether a later look can tell that nothing changed
        seen, left = set[int](), list(behind)
        while left:
            value = left.pop()
            if isinstance(value, Tensor):
                self.tensors[id(value)] = value
            elif value is not None and id(value) not in seen:
                seen.add(id(value))
                left += self._enter(value)
        self._is_unchanged = Unchanged(self._values, self._lengths, self._orders).holds

    def holds(self, behind: Sequence[Any]) -> bool:
        """Whether these are the same values, and nothing was put into one of them, or taken out."""
        same = len(behind) == len(self._behind) and all(map(is_, behind, self._behind))
        return same and self._is_known and self._is_unchanged()

    @property
    def is_light(self) -> bool:
        """Whether it may be held until the next call: no memory and no history that its owner may have given up."""
        return all(tensor.grad_fn is None and bytes_of(tensor) <= _LITTLE for tensor in self.tensors.values())

    def _enter(self, value: Any) -> Iterable[Any]:
        from fxopt.capture.reach import content  # the capture has paid for this import

        if is_long(value) or too_large(value) or (held := content(value)) is None:
            return ()
        if not isinstance(held, (dict, list, set)):
            self.memory.append(value)
            return ()
        self.contents.append((value, held))
        if isinstance(held, dict):
            return self._enter_named(value, held)
        self._keep_order(value)
        if isinstance(value, list):
            self._values += ((value, number, item) for number, item in enumerate(held))
            self._lengths.append((value, len(held)))
        return held

    def _keep_order(self, value: Any) -> None:
        if type(value) in _ORDERED:
            self._orders.append((value, list(value)))
        elif isinstance(value, (set, deque)):
            self._is_known = False

    def _enter_named(self, value: Any, held: dict[Any, Any]) -> Iterable[Any]:
        """The values of a dict, or those of an object in its dict and its slots."""
        own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        slots = Fields(value)
        self._values += ((own if name in own else slots, name, item) for name, item in held.items())
        self._lengths.append((own, len(own)))
        self._keep_order(own)
        return held.values()


def _is_kept(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter) and bytes_of(tensor) <= MOST


def bytes_of(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size if isinstance(size, int) else 0
