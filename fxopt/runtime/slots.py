"""What may be watched: the slots of modules and of the code behind them, and the dicts whose lengths stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxopt.names import is_setting, missing_of, named_by
from fxopt.reach.code import Code
from fxopt.reach.entries import Absent, Fields
from fxopt.reach.held import OWN, slots_of
from fxopt.runtime.inside import Slot
from fxopt.trees import is_dense

_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))

# Types whose forward reads neither `training` nor an attribute that people change after construction.
_QUIET_NAMES = """Embedding EmbeddingBag Linear Bilinear Identity Conv1d Conv2d LayerNorm RMSNorm Flatten Unflatten
    ModuleList ModuleDict Sequential ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU GLU SiLU Mish Sigmoid LogSigmoid
    Hardsigmoid Hardswish Hardtanh Tanh Softmax LogSoftmax Softplus Softsign CosineSimilarity"""
QUIET = frozenset(getattr(nn, name) for name in _QUIET_NAMES.split())
_CHILDLESS = QUIET - {nn.ModuleList, nn.ModuleDict, nn.Sequential}


def slots_in(path: str, module: nn.Module, code: Code) -> Iterator[Slot]:
    """What a forward may read of one module besides its tensors."""
    for name in OWN:
        if vars(module)[name]:
            yield Slot(path, vars(module), name, "tree")  # another dict once a list's item was deleted, or by __init__
    for name in module._modules:
        yield Slot(path, module._modules, name, "module")
    for name, value in module._parameters.items():
        if value is None:  # a bias that may appear later
            yield Slot(path, module._parameters, name)
        elif "requires_grad" in code.names:
            yield Slot(path, module._parameters, name)
            yield Slot(path, Fields(value), "requires_grad", of=value)
    others = (name for name, buffer in module._buffers.items() if buffer is None or not is_dense(buffer))
    yield from (Slot(path, module._buffers, name) for name in others)
    attributes = vars(module)
    quiet = type(module) in QUIET and "forward" not in attributes
    if "training" not in attributes:  # a property, as of torch.compile's OptimizedModule
        yield Slot(path, Fields(module), "training", of=module)
    elif not quiet or "training" in code.names:
        yield Slot(path, attributes, "training")
    names = attributes.keys() - _BASE_ATTRIBUTES
    for name in names & code.names if quiet else names:
        yield Slot(path, attributes, name)
    if not quiet:
        for name in slots_of(type(module)):
            if hasattr(module, name):
                yield Slot(path, Fields(module), name, of=module)


def seen_around(path: str, module: nn.Module, code: Code) -> Iterator[Slot]:
    """What code around an opaque module may ask of the modules in it."""
    yield from (Slot(path, module._modules, name, "module") for name in module._modules if name in code.names)
    yield from (Slot(path, vars(module), name) for name in (vars(module).keys() - _BASE_ATTRIBUTES) & code.names)


def tensor_slots(module: nn.Module) -> Iterator[Slot]:
    """Of a module outside of the tree, whose tensors are constants of a graph."""
    for where in (module._parameters, module._buffers):
        yield from (Slot("", where, name) for name in where)


def slots_on_tensors(code: Code) -> Iterator[Slot]:
    """The attributes that a user has put on tensors, and that the code names."""
    tensors = (value for value in code.held if isinstance(value, torch.Tensor) and vars(value))
    for tensor in tensors:
        names = vars(tensor).keys() if code.computed else vars(tensor).keys() & code.names
        yield from (Slot(type(tensor).__name__, vars(tensor), name) for name in names)


def attributes_of(code: Code) -> Iterator[tuple[str, Any]]:
    """What stands on functions."""
    return ((function.__qualname__, vars(function)) for function in code.functions.values() if vars(function))


def sized_in(module: nn.Module) -> Iterator[dict]:
    """Dicts that a new attribute, tensor or submodule would enter."""
    if module._modules or type(module) not in _CHILDLESS:
        yield module._modules
    yield vars(module)  # a forward of its own
    if type(module) not in QUIET:
        yield from (module._parameters, module._buffers)


def forward_slots(modules: list[tuple[str, nn.Module]]) -> Iterator[Slot]:
    """Each class's forward, wherever it is defined (GraphModule.recompile replaces it)."""
    for kind in {type(module) for _, module in modules}:
        owner = next((c for c in kind.__mro__ if "forward" in vars(c)), None)
        if owner is not None:
            yield Slot(kind.__name__, vars(owner), "forward", "class", owner)


def named_slots(code: Code) -> Iterator[Slot]:
    """The globals, the variables of enclosing functions and the attributes of classes that the forwards' code names."""
    for function in code.functions.values():
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found = [Slot(path, where, name, "global") for path, where, name in named_by(function)]
        found += [Slot(function.__qualname__, cell, name, "global") for name, cell in cells]
        yield from (slot for slot in found if is_setting(slot.read()))
        yield from (Slot(path, Absent(where), name, "global", where) for path, where, name in missing_of(function))
        given = [name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name)]
        yield from (Slot(function.__qualname__, function, name, "global") for name in ("__code__", *given))
    for module in code.modules.values():
        yield from (Slot(module.__name__, vars(module), name, "global") for name in code.names & vars(module).keys())
    for kind in code.classes:
        settings = (name for name in code.names & vars(kind).keys() if is_setting(vars(kind)[name]))
        for name in {*code.called_of(kind), *(name for name in settings if not name.startswith("__"))}:
            yield Slot(kind.__name__, vars(kind), name, "class", kind)
    if "environ" in code.names or "getenv" in code.names:
        yield Slot("os", vars(os), "environ", "global")
