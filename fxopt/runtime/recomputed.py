"""Calls within torch.utils.checkpoint: a recomputation saves what its forward saved only if the same side runs it.

Between the two a graph may have come, or gone, or its turn may be over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fxopt.torch_internals.autograd import Checkpoint

if TYPE_CHECKING:
    from fxopt.runtime.entry import Entry


class Noted:
    """A forward that runs eagerly, and whether it did.

    Attributes:
        entry: whose graph served the call, or failed before eager did, which has saved as well.
    """

    def __init__(self, eager: Callable[..., Any]) -> None:
        self._eager = eager
        self.ran = False
        self.entry: Entry | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        return self._eager(*args, **kwargs)


class Recomputed:
    """What served the calls of one model within checkpoints, in the order in which they began."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[Any, list[Noted]] = WeakKeyDictionary()
        self._again: WeakKeyDictionary[Any, Counter[object]] = WeakKeyDictionary()

    def begin(self, checkpoint: Checkpoint, call: Noted) -> None:
        """A call of the forward, which tells at its end what served it."""
        self._calls.setdefault(checkpoint.frame, []).append(call)

    def next(self, checkpoint: Checkpoint) -> Noted | None:
        """The call that a recomputation repeats next; None where the forward made no such call."""
        counts = self._again.setdefault(checkpoint.frame, Counter())
        counts[checkpoint.recomputation] += 1
        calls, number = self._calls.get(checkpoint.frame, []), counts[checkpoint.recomputation]
        return calls[number - 1] if number <= len(calls) else None
