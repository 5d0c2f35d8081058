"""A module that cannot be captured as a whole, with those of its submodules that can.

Its own Python runs as it is, on a stand-in of the module whose submodules are drop-ins made by `optimize`; they capture
at their first call. DIEN's evolution layer, whose recurrence goes over packed sequences, is 1.8x as fast at batch 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxopt.reach.held import slots_of
from fxopt.runtime.module import dispatcher_of
from fxopt.torch_internals.hooks import HOOKS

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OFFERS = 8  # calls of the whole that do not reach a part, before it is taken for one that none will
_FEWER = 2  # operators before / after: below it the checks of a call cost what the operators saved


class Pieces:
    """Called like `module`, and with the same effects.

    Args:
        optimize: makes a drop-in for a submodule, or raises TypeError.
    """

    def __init__(self, module: nn.Module, optimize: Callable[[nn.Module], nn.Module]) -> None:
        self.module = module
        self._optimize = optimize
        children = () if _is_special(module) else module.children()
        self._parts = {child: part for child in children if (part := self._part(child)) is not None}

    def on(self, copy_of: Callable[[nn.Module], nn.Module], touched: set[nn.Module]) -> Pieces:
        """The same around a copy of the module, with copies of the parts in place of those that are `touched`."""
        twin = object.__new__(Pieces)
        twin.module = copy_of(self.module)
        twin._parts = {
            copy_of(child): _Part(part.fast, part.inner.on(copy_of, touched))
            for child, part in self._parts.items()
            if touched.isdisjoint(child.modules())
        }
        return twin

    def __bool__(self) -> bool:
        """Whether there is a submodule worth a capture."""
        return bool(self._parts)

    @property
    def pay(self) -> bool:
        """Whether one of the parts is worth its checks."""
        return any(part.pays for part in self._parts.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pay:
            self._parts = {}  # for good: parts that are not called learn nothing
        if not self._parts or _is_special(self.module):  # by now
            return self.module(*args, **kwargs)
        made: list[tuple[nn.Module, nn.Module]] = []
        twin = self._stand_in(made)
        try:
            return twin(*args, **kwargs)
        finally:
            for original, copy in made:
                give_back(original, copy)

    def _part(self, child: nn.Module) -> _Part | None:
        if is_single(child) or _is_special(child):
            return None
        inner = Pieces(child, self._optimize)
        if isinstance(child, CONTAINERS):
            return _Part(None, inner) if inner else None
        try:
            fast = self._optimize(child)
        except TypeError:
            return None
        dispatcher_of(fast).quiet = True  # the report has said that the whole could not be captured
        return _Part(fast, inner)

    def _stand_in(self, made: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
        twin = object.__new__(type(self.module))
        modules, parts = dict(self.module._modules), self._parts
        for name, child in modules.items():
            if child in parts and parts[child].pays:
                modules[name] = parts[child].now(child, made)
        twin.__dict__.update(vars(self.module), _modules=modules)
        made.append((self.module, twin))
        return twin


class _Part:
    """A submodule: its drop-in, or where that is not to be had, it in pieces."""

    def __init__(self, fast: nn.Module | None, inner: Pieces) -> None:
        self.fast, self.inner = fast, inner
        self._offers = 0  # calls of the whole that it stood ready in

    @property
    def pays(self) -> bool:
        return self._is_fast or self.inner.pay

    @property
    def _is_fast(self) -> bool:
        """Until its first call nobody knows; some are never called, as the attention in torch's own encoder layer."""
        if self.fast is None:
            return False
        found = list(dispatcher_of(self.fast).findings)
        gains = (each.operators_before >= _FEWER * each.operators_after for each in found if not each.eager_reason)
        return any(gains) or (not found and self._offers < _OFFERS)

    def now(self, child: nn.Module, made: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
        if _is_special(child):
            return child
        if self.fast is None or not self._is_fast:
            return self.inner._stand_in(made)
        self._offers += 1
        return self.fast


def is_single(module: nn.Module) -> bool:
    """One operator of torch's own, such as a Linear: nothing to gain."""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _is_special(module: nn.Module) -> bool:
    """Whether a stand-in could be told from it: a hook is given the module, slots are not in its dict."""
    hooked = any(vars(module).get(name) for name in HOOKS)
    return hooked or isinstance(module, torch.jit.ScriptModule) or bool(slots_of(type(module)))


def give_back(original: nn.Module, copy: nn.Module) -> None:
    """What the forward has assigned to `self`; parameters and buffers are in dicts that both share."""
    before, after = vars(original), vars(copy)
    for name in list(_changed(before, after)):
        before[name] = after[name]
    for name in before.keys() - after.keys():
        del before[name]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    missing = object()
    return (name for name, value in after.items() if name != "_modules" and before.get(name, missing) is not value)
