"""The drop-in module: the original's own state under a subclass whose forward dispatches to captures."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import fx, nn
from torch.compiler import is_compiling

from fxopt.config import Config
from fxopt.reach.held import slots_of
from fxopt.runtime.dispatch import Dispatcher
from fxopt.runtime.executable import Compile
from fxopt.runtime.native import build_ahead
from fxopt.runtime.traced import passes_by, while_compiling
from fxopt.runtime.typed import Dispatched, bare_twin, is_known_by_type, is_typed
from fxopt.torch_internals.dynamo import is_compiled
from fxopt.torch_internals.hooks import COMPILED


class OptimizedMixin:
    """Goes first in the bases of a class made for one model class. `_fxopt` holds what is not the model's own.

    The instance shares its ``__dict__`` with the original, so parameters, buffers, submodules, hooks, the
    training flag and plain attributes are one and the same on both, and the original still runs eagerly.
    """

    __slots__ = ()
    _fxopt: Dispatcher

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not the model class's own: a registry of models must not see this one."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        state = self._fxopt
        return optimized, (state.original, state.compile, state.config)

    def __copy__(self) -> nn.Module:
        state = self._fxopt
        return optimized(copy.copy(state.original), state.compile, state.config)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        state = self._fxopt
        memo[id(self)] = new = optimized(copy.deepcopy(state.original, memo), state.compile, state.config)
        return new


_DEFAULT = Config()


def optimized(model: nn.Module, compile: Compile, config: Config = _DEFAULT) -> nn.Module:
    """A drop-in for `model` that captures each input signature at its first call and runs the compiled graph.

    Args:
        model: any nn.Module; stays usable, and shares all of its state with the result.
        compile: ``compile(model, args, kwargs, earlier)`` returns an Executable, or raises when the model has to stay
            eager. A module-level function (or a partial of one) keeps the result picklable.

    Raises:
        TypeError: not an nn.Module, or a ScriptModule (its graph is not Python's to replace).
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"fxopt: expected an eager nn.Module, found {type(model).__name__}; optimize before scripting")
    if not isinstance(model, nn.Module):
        raise TypeError(f"fxopt: expected an nn.Module, found {type(model).__name__}")
    if is_compiled(model):
        raise TypeError("fxopt: expected an eager nn.Module, found a compiled one; optimize before torch.compile")
    if isinstance(model, OptimizedMixin):
        model = model._fxopt.original
    build_ahead()
    if is_known_by_type(model):
        twin = bare_twin(model)
        twin.__dict__["forward"] = Dispatched(twin, Dispatcher(twin, compile, config))
        return twin
    new: Any = object.__new__(_subclass(type(model)))
    dispatcher = Dispatcher(model, compile, config)
    dispatcher.dynamo.code = type(new).forward.__code__
    object.__setattr__(new, "__dict__", model.__dict__)
    object.__setattr__(new, "_fxopt", dispatcher)
    return new


def dispatcher_of(model: nn.Module) -> Dispatcher:
    """The runtime state of an optimized model.

    Raises:
        TypeError: the model was not optimized.
    """
    if isinstance(model, nn.Module) and is_typed(model):
        return vars(model)["forward"].dispatcher
    if not isinstance(model, OptimizedMixin):
        raise TypeError(f"fxopt: expected a model returned by fxopt.optimize, found {type(model).__name__}")
    return model._fxopt


def _subclass(cls: type[nn.Module]) -> type:
    """The one optimized subclass of `cls`. Python's own weak list of subclasses is the cache."""
    for known in type.__subclasses__(cls):
        if known.__mro__[1] is OptimizedMixin:
            return known
    name = f"Optimized{cls.__name__}"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # Dynamo knows partials
            forward = functools.partial(cls.forward, self)
            if passes_by(self._fxopt, args, kwargs):
                return self._fxopt.dynamo.call(forward, args, kwargs)
            return while_compiling(self._fxopt, forward, args, kwargs)
        eager = types.MethodType(cls.forward, self)
        own = getattr(self, "_fxopt", None)  # none of a replica that was made without __init__ (nn.DataParallel)
        if own is None or self.__dict__ is not own.original.__dict__:  # or of a copy for a trace
            return eager(*args, **kwargs)
        return own(eager, args, kwargs)

    body: dict[str, Any] = {
        "__slots__": ("_fxopt",),
        "__module__": cls.__module__,
        "__qualname__": name,
        "__doc__": cls.__doc__,
        "forward": functools.wraps(cls.forward)(forward),
        COMPILED: _own_compiled(),
        **{slot: _delegate(slot) for slot in slots_of(cls)},
    }
    if issubclass(cls, fx.GraphModule):  # it writes a forward into the class of the instance
        body["recompile"] = lambda self: self._fxopt.original.recompile()
    kind = {"metaclass": _delegating(type(cls))}  # type: ignore[arg-type]
    new: Any = types.new_class(name, (OptimizedMixin, cls), kind, lambda namespace: namespace.update(body))
    new._is_made = True  # what is assigned from now on is the user's
    return new


@functools.cache
def _delegating(kind: type) -> type:
    """The class of optimized subclasses: what is assigned to type(model) goes to the model's own class."""

    def assign(cls: Any, name: str, value: Any) -> None:
        setattr(cls.__mro__[2], name, value) if "_is_made" in vars(cls) else kind.__setattr__(cls, name, value)  # type: ignore[call-arg]

    def delete(cls: Any, name: str) -> None:
        delattr(cls.__mro__[2], name)

    return types.new_class(kind.__name__, (kind,), exec_body=lambda n: n.update(__setattr__=assign, __delattr__=delete))


def _own_compiled() -> property:
    """What ``compile()`` made of this module is not the original's, and the other way round."""

    def keep(self: Any, compiled: Any) -> None:
        self._fxopt.compiled = compiled

    return property(lambda self: getattr(getattr(self, "_fxopt", None), "compiled", None), keep)


def _delegate(name: str) -> property:
    return property(
        lambda self: getattr(self._fxopt.original, name),
        lambda self, value: setattr(self._fxopt.original, name, value),
        lambda self: delattr(self._fxopt.original, name),
    )
