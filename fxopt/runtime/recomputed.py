"""Calls within torch.utils.checkpoint: a recomputation saves what its forward saved only if the same side runs it.

Between the two a graph may have come, or gone, or its turn may be over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fxopt.torch_internals.autograd import Checkpoint

if TYPE_CHECKING:
    from fxopt.runtime.entry import Entry


class Noted:
    """A forward that runs eagerly, whether it did, and whose graph has failed before that, which has saved as well."""

    def __init__(self, eager: Callable[..., Any]) -> None:
        self._eager = eager
        self.ran = False
        self.failed: Entry | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        return self._eager(*args, **kwargs)


class Recomputed:
    """What served the calls of one model within checkpoints, in their order: an entry, or None for eager."""

    def __init__(self) -> None:
        self._served: WeakKeyDictionary[Any, list[Entry | None]] = WeakKeyDictionary()
        self._again: WeakKeyDictionary[Any, dict[object, int]] = WeakKeyDictionary()

    def note(self, checkpoint: Checkpoint, entry: Entry | None) -> None:
        """A call of the forward was served."""
        self._served.setdefault(checkpoint.frame, []).append(entry)

    def next(self, checkpoint: Checkpoint) -> Entry | None:
        """What serves the next call of a recomputation.

        Raises:
            IndexError: the forward had no such call.
        """
        counts = self._again.setdefault(checkpoint.frame, defaultdict(int))
        counts[checkpoint.recomputation] += 1
        return self._served.get(checkpoint.frame, [])[counts[checkpoint.recomputation] - 1]
