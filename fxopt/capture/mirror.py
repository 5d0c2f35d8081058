"""Copies of what Python objects hold, so that a forward that runs on them edits nobody's own."""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import io
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import nn

from fxopt.capture.errors import CaptureError
from fxopt.reach.containers import MOST_BYTES, built_in, is_of_objects
from fxopt.reach.entries import MISSING, content_of
from fxopt.reach.held import behind_proxy, slots_of, wrapped

ATOMS = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device, type}
BYTES = (bytearray, array.array)
_OF_CTYPES = ctypes.c_int.__mro__[-2]
_UNSEEN = (memoryview, _OF_CTYPES, io.IOBase, SimpleQueue, threading.local, type(hashlib.md5()), np.void)
_SHARING = """threading queue multiprocessing concurrent asyncio socket ssl http subprocess tempfile shelve dbm
    sqlite3"""  # what their objects hold is other threads', processes' or machines', too
_HIDING = "pandas scipy"  # their objects hold arrays that nobody finds
_UNSEEN_LIBRARIES = frozenset(f"{_SHARING} {_HIDING}".split())
_OF_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_BARE = (dict, OrderedDict, list, set)
_DICTS = (OrderedDict, defaultdict, dict)
_CONTAINERS = (*_DICTS, list, set, deque)
_OWN_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__deepcopy__")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made in Python, whose instances are their attributes


class Mirror:
    """Copies of values, each object once: containers, plain objects, functions around them, arrays and tensors.

    What has a way of its own to be copied stays shared, and so do locks and loggers. Files, queues and events can be
    neither copied nor put back: what stands for them refuses to be used.

    Args:
        hold: the tensor that stands for one that is held.
    """

    def __init__(self, hold: Callable[[torch.Tensor], torch.Tensor]):
        self._hold = hold
        self._memo: dict[int, Any] = {}
        self._keep: list[Any] = []  # ids in the memo stay valid
        self._parts: set[int] = set()  # modules that are compared one by one

    def mirror(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, tuple):
            items = tuple(map(self.mirror, value))
            return items if kind is tuple else tuple.__new__(kind, items) if hasattr(kind, "_fields") else value
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._hold(value))
        if kind in _BARE and not value and not getattr(value, "__dict__", None):  # most of what a module holds
            return self._remember(value, kind())
        if (base := _container(kind)) is not None:  # type: ignore[arg-type]
            return self._filled(value, _bare(kind), functools.partial(self._fill_container, base, value))
        if kind is types.MethodType or kind in _OF_C:
            owner = self.mirror(value.__self__)
            return value if owner is value.__self__ else self._remember(value, _bound(value, owner))
        if kind is weakref.ReferenceType and id(value()) in self._memo:
            return self._remember(value, weakref.ref(self._memo[id(value())]))
        if kind in weakref.ProxyTypes:
            whole = behind_proxy(value)
            return self._remember(value, weakref.proxy(self._memo[id(whole)])) if id(whole) in self._memo else value
        if kind is functools.partial:
            named = {k: self.mirror(v) for k, v in value.keywords.items()}
            copy = functools.partial(self.mirror(value.func), *map(self.mirror, value.args), **named)
            return self._remember(value, copy)
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if kind is types.MappingProxyType:
            return self._remember(value, types.MappingProxyType(self.mirror(dict(value))))
        if kind in BYTES:
            return self._remember(value, value[:])
        if is_unseen(kind):
            return self._remember(value, _Unused(kind.__name__))
        if is_plain_object(kind):
            return self._filled(value, _bare(kind), lambda copy: self.fill(value, copy))
        if isinstance(value, Iterator):
            return self._remember(value, _Untaken())
        return value

    def fill(self, value: Any, copy: Any) -> None:
        """Give a bare `copy` of an object its attributes."""
        inside = getattr(copy, "__dict__", {})
        for name, item in attributes(value).items():
            if name in getattr(value, "__dict__", ()):
                inside[name] = self.mirror(item)
            else:
                object.__setattr__(copy, name, self.mirror(item))

    def _fill_container(self, base: type, value: Any, copy: Any) -> None:
        if base in _DICTS:
            if base is defaultdict:
                copy.default_factory = self.mirror(value.default_factory)
            for key, item in base.items(value):  # type: ignore[attr-defined]
                base.__setitem__(copy, self.mirror(key), self.mirror(item))  # type: ignore[attr-defined]
        else:
            more = (value.maxlen,) if base is deque else ()
            base.__init__(copy, map(self.mirror, base.__iter__(value)), *more)  # type: ignore[attr-defined,misc]
        self.fill(value, copy)

    def _array(self, array: np.ndarray) -> Any:
        """A copy, of a subclass too; of objects, with copies of those. What is large is shared, and refuses writes."""
        of_objects = is_of_objects(array)
        if array.dtype.hasobject and not of_objects:
            return self._remember(array, _Unused("structured array"))
        if array.nbytes > MOST_BYTES and not of_objects:
            shared = array.view()
            shared.flags.writeable = False
            return self._remember(array, shared)
        copy = array.copy()
        for place in np.ndindex(array.shape) if of_objects else ():
            copy[place] = self.mirror(array[place])
        return self._remember(array, copy)

    def _function(self, function: Any) -> Any:
        """A function around copies of the variables that it closes over."""
        cells = function.__closure__ or ()
        if not cells:
            return function
        made = tuple(types.CellType() for _ in cells)
        copy: Any = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, made
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self._remember(function, copy)
        copy.__dict__.update({name: self.mirror(value) for name, value in vars(function).items()})
        for cell, new in zip(cells, made, strict=True):
            if (content := content_of(cell)) is not MISSING:
                new.cell_contents = self.mirror(content)
        return copy

    def _filled(self, value: Any, copy: Any, fill: Callable[[Any], object]) -> Any:
        """`copy`, known before it is filled: what it holds may hold it."""
        self._remember(value, copy)
        fill(copy)
        return copy

    def _remember(self, value: Any, copy: Any) -> Any:
        self._memo[id(value)] = copy
        self._keep.append(value)
        return copy

    def same(self, before: Any, after: Any, seen: set[tuple[int, int]] | None = None) -> bool:
        """Whether `after` is still what `before` was mirrored to, or equal to it. seen: pairs that are no news: one
        that differs ends the search."""
        kind, known = type(before), self._memo.get(id(before), MISSING)
        pair, seen = (id(before), id(after)), set() if seen is None else seen
        if (before is after and known is MISSING) or pair in seen:
            return True
        seen.add(pair)
        if isinstance(before, torch.Tensor) or is_unseen(kind) or id(before) in self._parts:
            return known is after  # which may be of another type
        if kind is not type(after):
            return False
        if isinstance(before, (dict, types.MappingProxyType)):
            base = built_in(before)
            old, new = list(base.items(before)), list(base.items(after))
            return len(old) == len(new) and all(
                self.same(k, other, seen) and self.same(v, w, seen) for (k, v), (other, w) in zip(old, new, strict=True)
            )
        if isinstance(before, (list, tuple, deque)):
            old, new = (list(built_in(before).__iter__(each)) for each in (before, after))
            return len(old) == len(new) and all(self.same(a, b, seen) for a, b in zip(old, new, strict=True))
        if isinstance(before, set):
            return {id(self._memo.get(id(v), v)) for v in before} == set(map(id, after)) or before == after
        if isinstance(before, np.ndarray) and known is after and not after.flags.writeable:
            return True  # it was shared
        if is_of_objects(before):
            return before.shape == after.shape and all(
                map(functools.partial(self.same, seen=seen), before.flat, after.flat)
            )
        if isinstance(before, np.ndarray):
            return bool(before.shape == after.shape and before.tobytes() == after.tobytes())
        if kind in BYTES:
            return bool(before == after)
        if known is not MISSING:
            return known is after and self._same_inside(before, after, seen)
        return _equal(before, after)

    def _same_inside(self, before: Any, after: Any, seen: set[tuple[int, int]]) -> bool:
        if isinstance(before, types.FunctionType):
            cells = zip(before.__closure__ or (), after.__closure__ or (), strict=True)
            inside = all(self.same(content_of(a), content_of(b), seen) for a, b in cells)
            return inside and self.same(vars(before), vars(after), seen)
        if wraps := wrapped(before):
            return all(self.same(a, b, seen) for a, b in zip(wraps, wrapped(after), strict=True))
        if not is_plain_object(type(before)):
            return True
        old, new = attributes(before), attributes(after)
        return old.keys() == new.keys() and all(self.same(value, new[name], seen) for name, value in old.items())


class _Untaken:
    """Stands for an iterator, which would give the items that a look takes to nobody else."""

    def __iter__(self) -> _Untaken:
        return self

    def __next__(self) -> Any:
        raise CaptureError("takes the next item of an iterator, which a graph would do only once")

    def send(self, *args: Any) -> Any:
        return next(self)

    __getitem__ = __len__ = __array__ = send


_ASKED_OF_ALL = {"__class__", "__dict__", "_refuse"}  # by what only looks at what a model holds


class _Unused:
    """Stands for an object that holds what nobody can see or put back."""

    def __init__(self, kind: str) -> None:
        object.__setattr__(self, "_kind", kind)

    def _refuse(self, *args: Any) -> Any:
        kind = object.__getattribute__(self, "_kind")
        raise CaptureError(f"uses {kind}, of which a change would be neither seen nor undone")

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _ASKED_OF_ALL else self._refuse()

    __setattr__ = __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = _refuse
    __eq__ = __contains__ = __enter__ = __index__ = __float__ = _refuse
    __hash__ = object.__hash__


def _bound(method: Any, owner: Any) -> Any:
    """The same method of another object."""
    if type(method) is types.MethodType:
        return types.MethodType(method.__func__, owner)
    return getattr(owner, method.__name__)


def _is_unseen(kind: type) -> bool:
    """Whether what its instances hold can be neither seen nor put back: buffers of C, files, what threads share."""
    return issubclass(kind, _UNSEEN) or not _UNSEEN_LIBRARIES.isdisjoint(_libraries(kind))


is_unseen: Callable[[type], bool] = functools.lru_cache(4096)(_is_unseen)


def _libraries(kind: type) -> set[str]:
    return {base.__module__.partition(".")[0] for base in kind.__mro__}


def is_plain_object(kind: type) -> bool:
    """Whether instances are their attributes and nothing else, and do not say otherwise."""
    if issubclass(kind, (nn.Module, torch.optim.Optimizer)):
        return not issubclass(kind, torch.jit.ScriptModule)
    if is_unseen(kind) or "logging" in _libraries(kind):
        return False
    own = kind is types.SimpleNamespace or (_is_of_python(kind) and kind.__new__ is object.__new__)
    return own and all(_inherited(kind, name) for name in _OWN_WAYS)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


@functools.lru_cache(1024)
def _container(kind: type) -> Any:
    """The built-in container that `kind` is, or is a class around."""
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    return base if base is not None and kind.__new__ is base.__new__ else None


def _is_of_python(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE) and (kind.__dictoffset__ != 0 or "__slots__" in vars(kind))


def _inherited(kind: type, name: str) -> bool:
    """Whether a way of being copied is object's, or none."""
    base = types.SimpleNamespace if kind is types.SimpleNamespace else object
    return getattr(kind, name, None) is getattr(base, name, None)


def attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, those in slots too."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:
        return False
