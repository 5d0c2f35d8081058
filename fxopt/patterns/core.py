"""What every pattern speaks: a match, or a reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxopt.findings import Miss, Place


@dataclass(frozen=True)
class Reject:
    """Why something that looked like the pattern is not rewritten; `reason` says what a user can do about it."""

    reason: str
    node: Node

    def miss(self, pattern: str) -> Miss:
        return Miss(pattern, self.reason, place_of(self.node))


@dataclass(frozen=True)
class Match:
    """One place where a pattern holds. `anchor` is the node whose value the replacement gives."""

    anchor: Node
    bound: dict[str, Any]


def place_of(node: Node) -> Place:
    """Module path and source line of a node, as capture noted them."""
    return node.meta.get("place") or Place()
