"""Locks that a forked child finds free: the threads that held them are not there to give them back."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

WAIT = 30  # seconds for another thread's capture: it may be in the user's code, waiting for a lock that this one holds
_locks: weakref.WeakSet = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


def lock() -> Any:
    """A threading.RLock."""
    _watch_forks()
    new = threading.RLock()
    _locks.add(new)
    return new


def in_child(undo: Callable[[], None]) -> None:
    """Call `undo` in every forked child: what a thread of the parent had begun ends there."""
    _watch_forks()
    _undo.append(undo)


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_free)


def _free() -> None:
    for undo in _undo:
        undo()
    for held in _locks:
        held._at_fork_reinit()
