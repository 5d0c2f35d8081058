"""What normalization did, as the report shows it."""

from __future__ import annotations

from torch.fx import Node

from fxopt.findings import Change, Place

_UNNUMBERED = -1  # normalization takes no fuel: it is not among the rewrites that a wrong answer is traced to


def change(node: Node, what: str, why: str) -> Change:
    """One node that went."""
    return Change(_UNNUMBERED, node.name, what, why, node.meta.get("place", Place()))
