"""Where the time of a call goes: kinds of work by the own time of their operators, and what lies between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch.fx import Node

from fxopt.report.data import Spending
from fxopt.report.kinds import KINDS
from fxopt.report.own_time import OwnTimes

BETWEEN = "between operators"
BACKWARD = "backward, and between operators"


def spending(
    before: Mapping[str, float], eager: float, after: Mapping[str, float] | None, optimized: float, rest: str = BETWEEN
) -> tuple[Spending, ...]:
    """The kinds of work that occur, in the order of `KINDS`; they add up to the whole calls.

    What operators do not take by themselves is `rest`: Python, the dispatcher, checks of inputs. A clock around each
    costs more than some of them take, so that they may add up to more than the call; then they are scaled down to it.

    Args:
        before, after: seconds of each kind, as :func:`by_kind` gives them.
        eager, optimized: seconds of a whole call.
    """
    old, new = _completed(before, eager, rest), _completed(after, optimized, rest) if after is not None else None
    occurring = [kind for kind in (*KINDS, rest) if old.get(kind) or (new and new.get(kind))]
    return tuple(
        Spending(
            kind,
            old.get(kind, 0.0),
            old.get(kind, 0.0) / eager,
            new.get(kind, 0.0) if new is not None else None,
        )
        for kind in occurring
    )


def by_kind(own: OwnTimes, kinds: Mapping[Node, str]) -> dict[str, float]:
    """Seconds of each kind of work."""
    seconds = defaultdict[str, float](float)
    for node, spent in own.seconds.items():
        seconds[kinds[node]] += spent
    return seconds


def _completed(spent: Mapping[str, float], whole: float, rest: str) -> dict[str, float]:
    total = sum(spent.values())
    scale = min(1.0, whole / total) if total else 1.0
    return {kind: seconds * scale for kind, seconds in spent.items()} | {rest: max(0.0, whole - total)}
