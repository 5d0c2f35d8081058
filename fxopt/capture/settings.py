"""What a capture sets in this thread and in torch is put back, whatever was raised wherever.

Context managers do that too, but for an interrupt that comes just as one of them is being left.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, TypeVar

import torch

from fxopt.autocast import autocast_state, set_autocast
from fxopt.capture import uncompiled
from fxopt.locks import in_child
from fxopt.torch_internals.modes import Modes, dispatch_keys_kept

T = TypeVar("T")
_changes: defaultdict[int, list[tuple]] = defaultdict(list)  # of each thread, one within another: what was before


def kept(run: Callable[[], T]) -> T:
    """What `run` returns or raises; modes, gradients and torch's attributes are then as they are now, and after an
    exception random numbers too."""
    before = _Settings()
    with dispatch_keys_kept():
        try:
            uncompiled.begin()
            return run()
        except BaseException:
            before.restore()
            torch.random.set_rng_state(before.random)
            raise
        finally:
            before.restore()


def change(changes: Sequence[tuple[Any, str, Any]]) -> None:
    """Set attributes of torch, each an object, a name and a value, until the `kept` around this ends."""
    own, inherited = list[tuple[Any, str, Any]](), list[tuple[Any, str]]()
    for target, name, _ in changes:
        if isinstance(target, type) and name not in vars(target):
            inherited.append((target, name))
        else:
            own.append((target, name, vars(target).get(name) or getattr(target, name)))
    _changes[threading.get_ident()].append((own, inherited))
    _set(changes)


class Changed:
    """`change` for the time of a with-block. What an interrupt leaves of it, the `kept` around it puts back."""

    def __init__(self, changes: Sequence[tuple[Any, str, Any]]) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        change(self._changes)

    def __exit__(self, *error: Any) -> None:
        _put_back_last(_changes[threading.get_ident()])


def changed_here() -> int:
    """Number of changes that this thread has under way."""
    return len(_changes.get(threading.get_ident(), ()))


class _Settings:
    def __init__(self) -> None:
        self.random = torch.random.get_rng_state()
        self._modes = Modes()
        self._changes = changed_here()
        self._uncompiled = uncompiled.Before()
        self._autocast, self._autocast_cache = autocast_state(), torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        while changed_here() > self._changes:
            _put_back_last(_changes[threading.get_ident()])
        self._modes.restore()
        self._uncompiled.restore()
        set_autocast(self._autocast)
        torch.set_autocast_cache_enabled(self._autocast_cache)


def _set(changes: Sequence[tuple[Any, str, Any]]) -> None:
    """All of them, by no Python in between that an interrupt could stop."""
    deque(starmap(setattr, changes), maxlen=0)


def _put_back_last(changes: list[tuple]) -> None:
    own, inherited = changes[-1]
    _set(own)
    for target, name in inherited:
        if name in vars(target):  # an interrupt may have come in between
            delattr(target, name)
    del changes[-1]


def _unchanged() -> None:
    for changes in _changes.values():
        while changes:
            _put_back_last(changes)


in_child(_unchanged)
