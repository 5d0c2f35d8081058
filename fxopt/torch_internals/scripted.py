"""Functions of torch.jit.script in a trace: the Python that they were made from, where that means the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.torch_internals.patches import Change

_TYPES: dict[str, Any] = {
    "IntType": (int, torch.SymInt),
    "FloatType": (float, torch.SymFloat),
    "BoolType": (bool, torch.SymBool),
    "TensorType": torch.Tensor,
}


def scripted_as_written(error: Callable[[str], Exception]) -> Iterator[Change]:
    """TorchScript would run a part of such a function below the trace, without gradients. Where its Python means
    something else, a call raises `error`, which is told what is called, in words."""
    call, is_scripting = vars(torch.jit.ScriptFunction)["__call__"], torch.jit.is_scripting
    here, running = threading.get_ident(), list[str]()

    def written(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return call.__get__(self)(*args, **kwargs)
        held = vars(self)
        if "__name__" not in held:  # which torch.jit.script alone gives
            raise error(f"{self.name}, a function of torch.jit.trace or of a CompilationUnit")
        types = [argument.type for argument in self.schema.arguments]
        named = {argument.name: argument.type for argument in self.schema.arguments}
        running.append(f"{self.name}, a function of torch.jit.script")
        try:
            positional = [_converted(value, kind) for value, kind in zip(args, types, strict=False)]
            by_name = {name: _converted(value, named[name]) for name, value in kwargs.items() if name in named}
            return held["_torchdynamo_inline"](*positional, **{**kwargs, **by_name})
        except _Converts as found:
            raise error(f"{running[-1]} that makes another type of {found}") from None
        finally:
            running.pop()

    def asked() -> bool:
        of_torch = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        if running and not of_torch and threading.get_ident() == here:
            raise error(f"{running[-1]} that asks torch.jit.is_scripting()")
        return is_scripting()

    yield torch.jit.ScriptFunction, "__call__", written
    yield torch.jit, "is_scripting", asked


class _Converts(Exception):
    """TorchScript would make a number of a tensor, or the like."""


def _converted(value: Any, kind: Any) -> Any:
    """An argument as TorchScript takes it: a number of the declared type, and a copy of a list or dict."""
    name = kind.kind()
    if name == "OptionalType":
        return None if value is None else _converted(value, kind.getElementType())
    if name == "ListType" and isinstance(value, list | tuple):
        return [_converted(each, kind.getElementType()) for each in value]
    if name == "DictType" and isinstance(value, dict):
        return {key: _converted(each, kind.getValueType()) for key, each in value.items()}
    if name == "FloatType" and type(value) is int:
        return float(value)
    if not isinstance(value, _TYPES.get(name, object)) or (name == "IntType" and type(value) is bool):
        raise _Converts(f"a {type(value).__name__}")
    return value
