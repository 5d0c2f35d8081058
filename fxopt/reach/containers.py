"""Arrays and other containers: how much they hold, and whose methods read their entries."""

from __future__ import annotations

import array
import types
from collections import OrderedDict, deque
from typing import Any

import numpy as np

_MOST_ENTRIES = 30_000  # to compare at each call: of a list 5 ns each; of a dict 20, unless Python numbers its changes
MOST_BYTES = 1 << 20  # of an array, 37 us
MEMORY = (np.ndarray, array.array, bytearray, memoryview)


def is_long(value: Any) -> bool:
    """Whether a container has so many entries that only their number is looked at."""
    return isinstance(value, (list, set, deque, dict, types.MappingProxyType)) and len(value) > _MOST_ENTRIES


def too_large(value: Any) -> str:
    """How much an array holds, where that is too much to see whether it changes; "" otherwise."""
    if is_of_objects(value):
        return f"holds {value.size:,} objects" if value.size > _MOST_ENTRIES else ""
    if isinstance(value, MEMORY) and not is_read_only(value):
        return f"holds {size:,} bytes" if (size := bytes_of(value)) > MOST_BYTES else ""
    return ""


def bytes_of(memory: Any) -> int:
    """The size of an array's memory."""
    return memory.nbytes if isinstance(memory, (np.ndarray, memoryview)) else memoryview(memory).nbytes


def is_read_only(memory: Any) -> bool:
    """Whether it is an array of numbers whose owner says that nobody writes it, nor the one that it is a view of."""
    if is_of_objects(memory):
        return False
    while isinstance(memory, np.ndarray) and not memory.flags.writeable:
        memory = memory.base
    return memory is None or isinstance(memory, bytes)


def is_of_objects(value: Any) -> bool:
    """Whether it is an array of Python objects."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"


_BUILT_IN = (OrderedDict, dict, types.MappingProxyType, list, tuple, deque, set, frozenset)


def built_in(container: Any) -> Any:
    """The class of Python's that holds the entries of a container, to be read and written by that one's methods: those
    of a subclass may do anything. The dict of transformers' activations makes a new module at each read."""
    return next(kind for kind in _BUILT_IN if isinstance(container, kind))
