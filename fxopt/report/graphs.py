"""The graphs of one capture, before and after, with what was measured on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from fxopt.findings import Place
from fxopt.report.data import Block
from fxopt.report.kinds import kinds, kinds_after, runs
from fxopt.report.picture import blocks, described
from fxopt.report.sources import Sources

if TYPE_CHECKING:
    from fxopt.report.measure import Measured
    from fxopt.report.own_time import OwnTimes
    from fxopt.runtime import Executable

_MOST = 12  # nodes that a note shows


@dataclass(frozen=True)
class Graphs:
    """What notes ask about nodes by name, and the pictures.

    Attributes:
        old, new: nodes by name; own: of the optimized graph at the largest batch size (None: not measured).
    """

    sources: Sources = field(default_factory=Sources)
    old: Mapping[str, Node] = field(default_factory=dict)
    new: Mapping[str, Node] = field(default_factory=dict)
    own: OwnTimes | None = None
    before: tuple[Block, ...] = ()
    after: tuple[Block, ...] = ()

    @classmethod
    def of(cls, executable: Executable, measured: Sequence[Measured], sources: Sources) -> Graphs:
        captured, rewritten = executable.capture.graph.graph, executable.graph
        old = {each.measurement.batch: each.before for each in measured if each.before is not None}
        new = {each.measurement.batch: each.after for each in measured if each.after is not None}
        kinds_old = kinds(captured)
        last = old.get(max(old, default=0))
        work = last.work if last else {}
        for node in captured.nodes:
            sources.add(node.meta.get("place", Place()))
        if rewritten is None:
            return cls(sources, _by_name(captured.nodes), before=blocks(captured, kinds_old, old))
        kinds_new = kinds_after(rewritten.graph, {node.name: kind for node, kind in kinds_old.items()}, work)
        return cls(
            sources,
            _by_name(captured.nodes),
            _by_name(rewritten.graph.nodes),
            new.get(max(new, default=0)),
            blocks(captured, kinds_old, old),
            blocks(rewritten.graph, kinds_new, new),
        )

    def captured(self, names: Sequence[str]) -> tuple[str, ...]:
        return _some(names, self.old)

    def rewritten(self, names: Sequence[str]) -> tuple[str, ...]:
        return _some(names, self.new)

    def stake(self, places: Iterable[Place]) -> float | None:
        """Seconds that the operators at these places take which no rewrite has made."""
        if self.own is None:
            return None
        wanted = {place for place in places if place.line}
        left = (node for node in self.own.seconds if "origins" not in node.meta)
        return sum(self.own.seconds[node] for node in left if node.meta.get("place") in wanted)


def _by_name(nodes: Iterable[Node]) -> dict[str, Node]:
    return {node.name: node for node in nodes}


def _some(names: Sequence[str], nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """A few of the operators of these names that the graph has, described."""
    found = [nodes[name] for name in names if name in nodes and runs(nodes[name])]
    more = (f"and {len(found) - _MOST} more",) if len(found) > _MOST else ()
    return (*map(described, found[:_MOST]), *more)
