"""What a capture took from the module tree besides its tensors, and whether it still holds.

A traced graph has Python attributes, train/eval flags, submodules and the absence of hooks baked in.
`Watch` remembers them as (dict, key, value) triples, so that one call is a few C-speed passes over lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import getitem, not_
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from fxopt.reach import Cell, Code, Fields, is_users, named_by, slots_of
from fxopt.runtime.checks import comparer, length_check, python_read
from fxopt.runtime.flatten import same_value

_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    value for name, value in vars(nn_module).items() if name.startswith("_global_") and name.endswith("_hooks")
)

# Types whose forward reads neither `training` nor an attribute that people change after construction.
_QUIET_NAMES = """Embedding EmbeddingBag Linear Bilinear Identity Conv1d Conv2d LayerNorm RMSNorm Flatten Unflatten
    ModuleList ModuleDict Sequential ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU GLU SiLU Mish Sigmoid LogSigmoid
    Hardsigmoid Hardswish Hardtanh Tanh Softmax LogSoftmax Softplus Softsign CosineSimilarity"""
_QUIET = frozenset(getattr(nn, name) for name in _QUIET_NAMES.split())


@dataclass
class Slot:
    """One watched value: `where[key]`, an attribute, a submodule, a global, or a member of `of`, a class or a cell."""

    path: str
    where: Any
    key: str
    kind: str = "attribute"
    of: Any = None

    @property
    def identity(self) -> tuple[int, str]:
        return id(self.where if self.of is None else self.of), self.key  # vars(class) is another object each time

    def __str__(self) -> str:
        return f"{self.path}.{self.key}".lstrip(".")


class Watch:
    """The module tree as it was when a capture began.

    Args:
        model: the root.
        opaque: paths of submodules whose inside the capture does not depend on.
        ignore: names of slots not to watch.
        stored: attributes that the capture assigns itself at each call, by module.
        since: an earlier look at the model, whose values are the ones to expect.
        only: paths of the modules to watch, by default all that are not inside of opaque ones.
    """

    def __init__(
        self,
        model: nn.Module,
        opaque: tuple[str, ...] = (),
        ignore: frozenset[str] = frozenset(),
        stored: Mapping[nn.Module, set[str]] = MappingProxyType({}),
        since: Watch | None = None,
        only: frozenset[str] | None = None,
    ) -> None:
        every = [(p, m) for p, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        modules = [(p, m) for p, m in every if not _inside(p, opaque) and (only is None or p in only)]
        slots = [slot for path, module in modules for slot in _slots(path, module)] + list(_forwards(modules))
        leaves = [module for path, module in every if path in opaque or (only is not None and path not in only)]
        code = Code.behind((module for _, module in modules), without=leaves)
        slots += _named(code)
        named = code.names if _COMPUTED.isdisjoint(code.names) else {slot.key for slot in slots}
        asked = [s for s in slots if s.path not in opaque and (s.kind != "attribute" or s.key in named)]
        slots += list(_inside_records(asked, code))
        assigned = {(id(vars(module)), name) for module, names in stored.items() for name in names}
        self._slots = [s for s in slots if str(s) not in ignore and (id(s.where), s.key) not in assigned]
        self._wheres = [slot.where for slot in self._slots]
        self._keys = [slot.key for slot in self._slots]
        self._values = list(map(getitem, self._wheres, self._keys))
        self._unchanged, self._lengths = comparer(), length_check()
        held = [vars(v) if _is_record(v) else v for v in self._values if _is_record(v) or isinstance(v, _CONTAINERS)]
        containers = [(v, _copy(v)) for v in held if _size(v) <= _LARGE]
        self._containers = [v for v, _ in containers]
        self._contents = [copy for _, copy in containers]
        self._arrays = [v for v in self._values if isinstance(v, np.ndarray) and v.size <= _LARGE]
        self._bytes = [array.tobytes() for array in self._arrays]
        self._stored = [(vars(module), names) for module, names in stored.items()]
        open_ended = {id(attributes) for attributes, _ in self._stored}
        sized = [(path, d) for path, module in modules for d in _sized(module) if id(d) not in open_ended]
        self._others = [attributes.keys() - names for attributes, names in self._stored]
        self._sized = [*(d for _, d in sized), *(v for v in held if _size(v) > _LARGE)]
        self._sizes = list(map(len, self._sized))
        self._known = [(path, d, frozenset(d)) for path, d in sized]
        inside = [m for p, m in modules if m is not model]  # the root's own hooks run around the graph
        hooks = [*_GLOBAL_HOOKS, *(vars(m)[name] for m in inside for name in HOOKS)]
        self._present = [d for d in hooks if d]
        self._absent = [d for d in hooks if not d]
        self._hook_id = RemovableHandle.next_id
        if since is not None:
            self._expect(since, opaque)

    def _expect(self, since: Watch, opaque: tuple[str, ...]) -> None:
        """What `since` saw; but opaque modules as they are now, since the capture has run them."""
        known = {slot.identity: value for slot, value in zip(since._slots, since._values, strict=True)}
        ours = [(slot.path in opaque, slot, value) for slot, value in zip(self._slots, self._values, strict=True)]
        self._values = [value if free else known.get(slot.identity, _MISSING) for free, slot, value in ours]
        free = {id(slot.where) for inside, slot, _ in ours if inside} | {
            id(value) for inside, _, value in ours if inside
        }
        self._contents = _of(since._containers, since._contents, self._containers, self._contents, free)
        self._bytes = _of(since._arrays, since._bytes, self._arrays, self._bytes, free)
        self._sizes = _of(since._sized, since._sizes, self._sized, self._sizes, free)
        self._absent += [d for d in self._present if any(d is absent for absent in since._absent)]
        self._hook_id = since._hook_id

    @property
    def slots(self) -> list[tuple[Any, str, Any]]:
        """(container, key, value) of all that is watched."""
        return list(zip(self._wheres, self._keys, self._values, strict=True))

    def holds(self) -> bool:
        """Whether nothing changed."""
        return (
            (self._unchanged(self._wheres, self._keys, self._values) or self._equal())
            and self._lengths(self._sized, self._sizes)
            and (not self._containers or same_value(self._containers, self._contents))
            and (not self._arrays or [array.tobytes() for array in self._arrays] == self._bytes)
            and (not self._stored or [d.keys() - names for d, names in self._stored] == self._others)
            and all(self._present)
            and (RemovableHandle.next_id == self._hook_id or self._still_absent())
        )

    def _equal(self) -> bool:
        """Equal but new objects (`model.temperature = 0.5` at each step); they are the ones to expect from now on."""
        values = python_read(self._wheres, self._keys)
        if values is None or not all(map(same_value, values, self._values)):
            return False
        self._values = values
        return True

    def _still_absent(self) -> bool:
        now = RemovableHandle.next_id  # every registration of any hook takes one
        if any(self._absent):
            return False
        self._hook_id = now
        return True

    def same_tree(self) -> bool:
        """Whether the submodules are still the ones captured: if not, train() or an attribute cannot bring it back."""
        return all(
            slot.where.get(slot.key) is value
            for slot, value in zip(self._slots, self._values, strict=True)
            if slot.kind == "module"
        )

    def changed(self) -> list[Slot]:
        """The watched values that differ now, and the new ones."""
        now = [slot.where.get(slot.key, _MISSING) for slot in self._slots]
        new = [Slot(path, where, key, "new") for path, where, known in self._known for key in where.keys() - known]
        return [*compress(self._slots, map(not_, map(same_value, now, self._values))), *new]


_MISSING = object()
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.Tensor,
    nn.Module,
    np.ndarray,
    ModuleType,
    FunctionType,
)
_CONTAINERS = (list, dict, set)
_DATA = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device, *_CONTAINERS)
_COMPUTED = {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter"}  # for names that no code spells
_DEPTH = 3
_LARGE = 1000  # comparing a dict costs 20 ns an entry: of a vocabulary only the length is watched


def _of(keys: list, values: list, wanted: list, now: list, free: set[int]) -> list:
    """The value of each wanted object, by identity; the one of now where there was none, or it is free to change."""
    known = {id(key): value for key, value in zip(keys, values, strict=True) if id(key) not in free}
    return [known.get(id(key), value) for key, value in zip(wanted, now, strict=True)]


def _inside(path: str, opaque: tuple[str, ...]) -> bool:
    return any(path.startswith(leaf + ".") for leaf in opaque)


def _slots(path: str, module: nn.Module) -> Iterator[Slot]:
    for name in module._modules:
        yield Slot(path, module._modules, name, "module")
    for name, value in module._parameters.items():
        if value is None:  # a bias that may appear later
            yield Slot(path, module._parameters, name)
    attributes = vars(module)
    if type(module) not in _QUIET or "forward" in attributes:
        yield Slot(path, attributes, "training")
        for name in attributes.keys() - _BASE_ATTRIBUTES:
            yield Slot(path, attributes, name)
        for name in slots_of(type(module)):  # type: ignore[arg-type]
            if hasattr(module, name):
                yield Slot(path, Fields(module), name, of=module)


def _sized(module: nn.Module) -> Iterator[dict]:
    """Dicts that a new attribute, tensor or submodule would enter."""
    if module._modules:
        yield module._modules
    yield vars(module)  # a forward of its own
    if type(module) not in _QUIET:
        yield from (module._parameters, module._buffers)


def _forwards(modules: list[tuple[str, nn.Module]]) -> Iterator[Slot]:
    """Each class's forward, wherever it is defined (GraphModule.recompile replaces it)."""
    for kind in {type(module) for _, module in modules}:
        owner = next((c for c in kind.__mro__ if "forward" in vars(c)), None)
        if owner is not None:
            yield Slot(kind.__name__, vars(owner), "forward", "class", owner)


def _named(code: Code) -> Iterator[Slot]:
    """The globals, the variables of enclosing functions and the attributes of classes that the forwards' code names."""
    for function in code.functions.values():
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found = [Slot(path, where, name, "global") for path, where, name in named_by(function)]
        found += [Slot(function.__qualname__, Cell(cell), name, "global", cell) for name, cell in cells]
        yield from (slot for slot in found if _is_setting(slot.where[slot.key]))
    for kind in code.classes:
        for name in code.names & vars(kind).keys():
            if _is_setting(vars(kind)[name]) and not name.startswith("__"):
                yield Slot(kind.__name__, vars(kind), name, "class", kind)
    if "environ" in code.names or "getenv" in code.names:
        yield Slot("os.environ", vars(os.environ), "_data", "global")


def _is_setting(value: Any) -> bool:
    """What code may decide by: data, settings, a function of the user's; not a class, and not a library's function."""
    if isinstance(value, FunctionType):
        return is_users(value.__module__)
    return not (callable(value) or isinstance(value, (ModuleType, classmethod, staticmethod, property)))


def _inside_records(slots: list[Slot], code: Code) -> Iterator[Slot]:
    """The attributes that the code names of the objects behind these values, and of what those hold."""
    seen, level = set[int](), [(slot.path or slot.key, slot.where[slot.key]) for slot in slots]
    whole = {id(value) for _, value in level}  # settings that are watched as they are
    for _ in range(_DEPTH + 1):
        inner: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen or isinstance(value, _OPAQUE):
                continue
            seen.add(id(value))
            if isinstance(value, (list, tuple, dict)):
                inner += [(path, item) for item in (value.values() if isinstance(value, dict) else value)][:_LARGE]
            elif _is_record(value) and id(value) in whole:
                inner += [(path, item) for item in vars(value).values()]
            else:
                found = list(_fields(path, value, code))
                whole.update(id(slot.where[slot.key]) for slot in found)
                inner += [(str(slot), slot.where[slot.key]) for slot in found]
                yield from found
        level = inner


def _fields(path: str, value: Any, code: Code) -> Iterator[Slot]:
    open_ended = _is_record(value) or hasattr(type(value), "__getattr__")  # or it is asked for under other names
    fields = getattr(value, "__dict__", {})
    for name in fields if open_ended else code.names & fields.keys():
        yield Slot(path, fields, name)
    for name in slots_of(type(value)):  # type: ignore[arg-type]
        if name in code.names and hasattr(value, name):
            yield Slot(path, Fields(value), name, of=value)


def _is_record(value: Any) -> bool:
    """Settings by name: a namespace, a dataclass, a config object. Not what does something and counts, or logs."""
    named = hasattr(value, "__dict__") and not isinstance(value, (*_DATA, type, torch.Tensor, nn.Module))
    return named and bool(vars(value)) and all(isinstance(item, _DATA) for item in vars(value).values())


def _size(value: Any, depth: int = _DEPTH) -> int:
    """Number of entries, down to `_DEPTH` containers in containers (a cycle is no problem then)."""
    children = value.values() if isinstance(value, dict) else value
    inner = (child for child in children if depth and isinstance(child, _CONTAINERS))
    return len(value) + sum(_size(child, depth - 1) for child in inner)


def _copy(value: Any, depth: int = _DEPTH) -> Any:
    """Containers copied down to the same depth, what they hold by reference."""
    if depth and type(value) is dict:
        return {k: _copy(v, depth - 1) for k, v in value.items()}
    if depth and type(value) is list:
        return [_copy(v, depth - 1) for v in value]
    return value.copy() if isinstance(value, _CONTAINERS) else value
