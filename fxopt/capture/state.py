"""Parameters and buffers as inputs, and a copy of the module tree to trace on.

The user's modules may be serving other threads while we trace: nothing here writes to them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.capture.errors import CaptureError
from fxopt.findings import Place


@dataclass(frozen=True)
class StateSlot:
    """A tensor of the model: model.get_submodule(module)._parameters[name] or ._buffers[name]."""

    module: str
    name: str
    kind: str

    def read(self, model: nn.Module) -> torch.Tensor:
        owner = model.get_submodule(self.module)
        return (owner._parameters if self.kind == "parameter" else owner._buffers)[self.name]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in HOOKS)


class ModelCopy:
    """New module objects around the same attribute values, with tensors of the state replaced.

    Args:
        model: left untouched.
        swap: the replacement of a parameter or buffer (fake for tracing, a clone for a trial run).

    Attributes:
        root: the copy. paths: id of each copied module to its path.
        state: slot, tensor and replacement of what was replaced, in order, tied tensors once.
    """

    def __init__(self, model: nn.Module, swap: Callable[[torch.Tensor, StateSlot], torch.Tensor]):
        self._model = model
        self._swap = swap
        self._memo: dict[int, Any] = {}
        self._keep: list[Any] = []  # ids in the memo stay valid
        self.originals: dict[int, nn.Module] = {}
        self.paths: dict[int, str] = {}
        self.state: list[tuple[StateSlot, torch.Tensor, torch.Tensor]] = []
        for path, module in model.named_modules():
            self._memo[id(module)] = copy = object.__new__(type(module))
            self.paths[id(copy)] = path
            self.originals[id(copy)] = module
        for path, module in model.named_modules():
            self._tensors(path, module)
        for module in model.modules():
            self._fill(module)
        self.root: nn.Module = self._memo[id(model)]

    def _tensors(self, path: str, module: nn.Module) -> None:
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in store.items():
                if tensor is not None and id(tensor) not in self._memo:
                    slot = StateSlot(path, name, kind)
                    self._memo[id(tensor)] = new = self._swap(tensor, slot)
                    if new is not tensor:
                        self.state.append((slot, tensor, new))

    def _fill(self, module: nn.Module) -> None:
        self._memo[id(module)].__dict__.update({k: self.mirror(v) for k, v in module.__dict__.items()})

    def mirror(self, value: Any) -> Any:
        """`value` with copied containers, modules and state tensors; anything else as it is."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind in (dict, OrderedDict):
            return self._remember(value, kind((k, self.mirror(v)) for k, v in value.items()))
        if kind in (list, set, deque):
            return self._remember(value, kind(map(self.mirror, value)))
        if kind is defaultdict:
            items = {k: self.mirror(v) for k, v in value.items()}
            return self._remember(value, defaultdict(value.default_factory, items))
        if kind is tuple:
            return tuple(map(self.mirror, value))
        if kind is types.MethodType and id(value.__self__) in self._memo:
            return self._remember(value, types.MethodType(value.__func__, self._memo[id(value.__self__)]))
        if kind is weakref.ReferenceType and id(value()) in self._memo:
            return self._remember(value, weakref.ref(self._memo[id(value())]))
        if kind is functools.partial:
            copy = functools.partial(self.mirror(value.func), *map(self.mirror, value.args), **value.keywords)
            return self._remember(value, copy)
        return value

    def _remember(self, value: Any, copy: Any) -> Any:
        self._memo[id(value)] = copy
        self._keep.append(value)
        return copy

    def at(self, path: str) -> nn.Module:
        """The copy of the submodule at `path`."""
        return self._memo[id(self._model.get_submodule(path))]

    def changed_attributes(self) -> dict[str, set[str]]:
        """Path of each module whose forward assigned other values to attributes or buffers, and their names."""
        changed: dict[str, set[str]] = {}
        for copy_id, module in self.originals.items():
            before, after = module.__dict__, self._memo[id(module)].__dict__
            names = {name for name in after.keys() | before.keys() if not self._same_item(name, before, after)}
            names.discard("_written")
            if "_buffers" in names:
                old, new = module._buffers, self._memo[id(module)]._buffers
                changed_buffers = {name for name in old.keys() | new.keys() if not self._same_item(name, old, new)}
                names = names - {"_buffers"} | (changed_buffers if old.keys() == new.keys() else {"_buffers"})
            if names:
                changed[self.paths[copy_id]] = names
        return changed

    def _same_item(self, name: str, before: dict, after: dict) -> bool:
        return self._same(before.get(name, _MISSING), after.get(name, _MISSING))

    def _same(self, before: Any, after: Any) -> bool:
        """Whether `after`, in the copy, is still what `before` was mirrored to, or equal to it."""
        if before is after:
            return True
        known = self._memo.get(id(before))
        if isinstance(before, (dict, list, tuple, set, deque)) and type(before) is type(after):
            if len(before) != len(after):
                return False
            if isinstance(before, dict) and isinstance(after, dict):
                return all(k in after and self._same(v, after[k]) for k, v in before.items())
            if isinstance(before, set):
                return before == after
            return all(map(self._same, before, after))
        if known is not None:
            return known is after
        if isinstance(before, (torch.Tensor, nn.Module)) or isinstance(after, (torch.Tensor, nn.Module)):
            return False
        try:
            return bool(before == after)
        except Exception:
            return False


_MISSING = object()
_ATOMS = {type(None), bool, int, float, str, torch.dtype, torch.device, types.FunctionType, type}


def fake_state(
    fake_mode: FakeTensorMode, within_leaf: Callable[[str], bool]
) -> Callable[[torch.Tensor, StateSlot], torch.Tensor]:
    """Fakes with the tensor's own sizes and strides, static. Leaves may have tensors of any kind."""

    def fake(real: torch.Tensor, slot: StateSlot) -> torch.Tensor:
        if type(real) not in (torch.Tensor, nn.Parameter, nn.Buffer) or real.layout is not torch.strided:
            if within_leaf(slot.module):
                return real
            raise CaptureError(f"{slot}: expected a dense tensor, found {type(real).__qualname__}", Place(slot.module))
        with fake_mode:
            new = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        new.requires_grad_(real.requires_grad)
        if slot.kind == "parameter":
            new._is_param = True  # type: ignore[attr-defined]  # isinstance(new, nn.Parameter)
        return new

    return fake
