"""Which modules talk to other processes when they are called. fxopt runs none of them but where the user does.

Nothing of torchrec is imported: a sharded module is known by the package of its classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxopt.names import named_by, names_in
from fxopt.reach.code import Code
from fxopt.reach.held import functions_in, held_by
from fxopt.runtime.typed import is_typed

_PACKAGES = ("torch.distributed", "torch.nn.parallel", "torchrec.distributed")
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torchrec.distributed.model_parallel", "DistributedModelParallel", "_dmp_wrapped_module"),
)


def inner(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The wrapper nearest to the model that DDP or DMP wraps, and the name that this model has in it; or None."""
    for module, kind, name in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module), kind, None)
        if wrapper is not None and isinstance(model, wrapper):
            return inner(model._modules[name]) or (model, name)  # type: ignore[arg-type]
    return None


def communicating(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of the tree that may communicate by themselves, each with the reason to think so."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    modules = set(model.modules())
    reasons = {module: _reason(module, modules) for module in model.modules()}
    return {module: reason for module, reason in reasons.items() if reason}


def _reason(module: nn.Module, others: Iterable[nn.Module]) -> str:
    kind = next((base for base in type(module).__mro__ if _is_of(base.__module__, _PACKAGES)), None)
    if kind is not None:
        return f"communicates: it is a {kind.__module__.partition('.')[0]} {kind.__qualname__}"
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    if "forward" in vars(module) and not is_typed(module):
        return "its forward was replaced, as pipelines do: it runs as it is"
    if isinstance(module, nn.SyncBatchNorm):
        return "communicates: it is a SyncBatchNorm"
    if type(module).__module__.startswith("torch.nn."):
        return ""
    apart = [other for other in others if other is not module]
    if any(isinstance(value, _groups()) for value in held_by(module, without=apart)):
        return "communicates: it holds a process group"
    called = next(filter(None, map(_called, _functions(module, apart))), "")
    return f"communicates: its code calls {called}" if called else ""


@functools.cache
def _groups() -> tuple[type, ...]:
    from torch.distributed.device_mesh import DeviceMesh

    return (dist.ProcessGroup, DeviceMesh)


def _functions(module: nn.Module, apart: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """What the forward may call, autograd functions too; methods of other modules are asked by themselves."""
    code = Code.behind([module], without=apart)
    others = [kind for kind in code.classes if issubclass(kind, nn.Module) and not isinstance(module, kind)]
    known = {id(function) for kind in others for function in functions_in(vars(kind).values())}
    for function in code.functions.values():
        if id(function) in known or function.__name__ == "__init__":
            continue
        if not _is_of(function.__module__, ("torchrec", "fbgemm_gpu")):
            yield function
            values = [where[name] for _, where, name in named_by(function)]
            kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)]
            yield from functions_in(vars(kind).get(name) for kind in kinds for name in ("forward", "backward"))


def _called(function: FunctionType) -> str:
    """What of torch.distributed the code names; "" where nothing."""
    read, named = names_in(function.__code__)
    for name in read & function.__globals__.keys():
        value: Any = function.__globals__[name]
        if isinstance(value, ModuleType):
            if _is_of(value.__name__, _PACKAGES) or (value.__name__ == "torch" and "distributed" in named):
                return value.__name__ if value.__name__ != "torch" else "torch.distributed"
        elif isinstance(value, Callable) and _is_of(getattr(value, "__module__", None), _PACKAGES):  # type: ignore[arg-type]
            return f"{value.__module__}.{name}"
    return ""


def _is_of(module: str | None, packages: tuple[str, ...]) -> bool:
    return any(module == package or (module or "").startswith(f"{package}.") for package in packages)
