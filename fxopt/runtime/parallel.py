"""DistributedDataParallel: its own forward, hooks and buckets, around a drop-in of the module inside."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxopt.config import Config
from fxopt.runtime.executable import Compile
from fxopt.runtime.module import OptimizedMixin, optimized, subclass


class AroundMixin(OptimizedMixin):
    """Shares its ``__dict__`` with the original, so `no_sync()`, buckets and communication hooks are those of both.

    Attributes:
        _wrapper: the original.
        _inside: a drop-in for what it wraps; `_fxopt` is its runtime state.
    """

    __slots__ = ()
    _wrapper: DistributedDataParallel
    _inside: nn.Module

    @property
    def module(self) -> nn.Module:
        """What DistributedDataParallel calls."""
        wrapped = vars(self)["_modules"]["module"]
        return self._inside if self._fxopt.original is wrapped else wrapped

    def _original(self) -> DistributedDataParallel:
        return self._wrapper

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return around, (self._wrapper, self._inside)

    def __copy__(self) -> nn.Module:
        return around(copy.copy(self._wrapper), self._inside)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        memo[id(self)] = new = around(copy.deepcopy(self._wrapper, memo), copy.deepcopy(self._inside, memo))
        return new


def around(wrapper: DistributedDataParallel, inside: Any) -> nn.Module:
    """A drop-in for `wrapper` that calls `inside`, a drop-in for `wrapper.module`."""
    body = {"__slots__": ("_fxopt", "_wrapper", "_inside")}
    new: Any = object.__new__(subclass(type(wrapper), AroundMixin, body))
    object.__setattr__(new, "__dict__", wrapper.__dict__)
    for name, value in (("_fxopt", inside._fxopt), ("_wrapper", wrapper), ("_inside", inside)):
        object.__setattr__(new, name, value)
    return new


def drop_in(model: nn.Module, compile: Compile, config: Config) -> nn.Module:
    """:func:`.optimized`, where `model` is a DistributedDataParallel that of the module inside."""
    wrapper = model._original() if isinstance(model, AroundMixin) else model
    if not isinstance(wrapper, DistributedDataParallel):
        return optimized(wrapper, compile, config)
    return around(wrapper, optimized(wrapper.module, compile, config))
