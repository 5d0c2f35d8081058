"""Memory of a tensor's own: what leaves the model in it must not leave in memory that someone else knows."""

from __future__ import annotations

from torch.fx import Node

from fxopt.shape.aliases import Aliases


class Freshness:
    """Which fresh tensors of a graph another one may stand for."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._handed_out: set[Node] = set()

    def survives(self, node: Node, source: Node) -> bool:
        """Whether `source` may stand for `node`, which nobody edits. Two that leave never share one source."""
        if self._aliases.edited(node) or self._aliases.edited(source):
            return False
        if not self._aliases.leaves(node):
            return True
        if not self._aliases.owned(source) or self._aliases.leaves(source) or source in self._handed_out:
            return False
        self._handed_out.update(self._aliases.sharing(source))
        return True
