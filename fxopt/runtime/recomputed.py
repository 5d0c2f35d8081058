"""Calls within torch.utils.checkpoint: a recomputation saves what its forward saved only if the same side runs it.

Between the two a graph may have come, or gone, or its turn may be over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class Served:
    """What served a call of a forward: an entry, or None for eager."""

    entry: Entry | None = None


class Recomputed:
    """What served the calls of one model within checkpoints, in the order in which they began."""

    def __init__(self) -> None:
        self._served: WeakKeyDictionary[Any, list[Served]] = WeakKeyDictionary()
        self._again: WeakKeyDictionary[Any, dict[object, int]] = WeakKeyDictionary()

    def begin(self, checkpoint: Checkpoint) -> Served:
        """A call of the forward, of which its end tells more."""
        served = Served()
        self._served.setdefault(checkpoint.frame, []).append(served)
        return served

    def next(self, checkpoint: Checkpoint) -> Served | None:
        """What served the call that a recomputation makes next; None where the forward made no such call."""
        counts = self._again.setdefault(checkpoint.frame, defaultdict(int))
        counts[checkpoint.recomputation] += 1
        calls, number = self._served.get(checkpoint.frame, []), counts[checkpoint.recomputation]
        return calls[number - 1] if number <= len(calls) else None
