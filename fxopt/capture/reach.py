"""What a model's code reaches by name outside of the model: globals of its modules, attributes of its classes.

A forward that counts in one of them would do so once, in the trace. So these are compared after every look, put back,
and what changed is the reason why the model stays eager.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from fxopt.capture.mirror import attributes, is_plain_object
from fxopt.reach import Code, named_by

_NUMBERS = (bool, int, float, complex, str, bytes, tuple, type(None))
_LARGE = 1000  # entries
_MISSING = object()


class Reach:
    """The names that code of `model` reads outside of it, and what they hold now."""

    def __init__(self, model: nn.Module):
        hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        code = Code.behind([*model.modules(), *hooks])
        self._seen: set[int] = set()
        self._names: list[tuple[Any, str, Any]] = []  # owner (a dict or a class), name, value
        self._contents: list[tuple[str, Any, Any]] = []  # name, container, what it holds
        for function in code.functions.values():
            for _, where, name in named_by(function):
                self._value(name, where, where[name])
        for kind in code.classes:
            for name in code.names & vars(kind).keys():
                self._value(name, kind, vars(kind)[name])

    def changed(self) -> str:
        """The first name that holds something else now; "" where none does."""
        for owner, name, value in self._names:
            if _read(owner, name) is not value:
                return name
        return next((name for name, value, held in self._contents if not _same(content(value), held)), "")

    def put_back(self) -> None:
        for owner, name, value in self._names:
            if _read(owner, name) is not value:
                owner.__setitem__(name, value) if isinstance(owner, dict) else setattr(owner, name, value)
        for _, value, held in self._contents:
            if not _same(content(value), held):
                refill(value, held)

    def _value(self, name: str, owner: Any, value: Any) -> None:
        if owner is not None and isinstance(value, _NUMBERS):
            self._names.append((owner, name, value))
        if isinstance(value, (*_NUMBERS, type)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if (held := content(value)) is not None:
            self._contents.append((name, value, held))
            for item in held.values() if isinstance(held, dict) else held if isinstance(held, (list, set)) else ():
                self._value(name, None, item)


def _read(owner: Any, name: str) -> Any:
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _MISSING)


def content(value: Any) -> Any:
    """What a container or plain object holds, by reference; None for anything else, and for what is large."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _LARGE else None
    if isinstance(value, (dict, set)):
        held: Any = dict(value) if isinstance(value, dict) else set(value)
    elif isinstance(value, list) or type(value).__name__ == "deque":
        held = list(value)
    elif is_plain_object(type(value)) and not isinstance(value, nn.Module):
        held = attributes(value)
    else:
        return None
    return held if len(held) <= _LARGE else None


def _same(now: Any, held: Any) -> bool:
    if isinstance(held, np.ndarray):
        return bool(np.array_equal(now, held))
    if type(now) is not type(held) or len(now) != len(held):
        return False
    if isinstance(held, dict):
        return all(key in now and now[key] is value for key, value in held.items())
    return all(map(lambda a, b: a is b, now, held)) if isinstance(held, list) else now == held


def refill(value: Any, held: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = held
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(held)
    elif isinstance(held, list):
        value.clear()
        value.extend(held)
    else:
        for name in attributes(value).keys() - held.keys():
            object.__delattr__(value, name)
        for name, item in held.items():
            object.__setattr__(value, name, item)
