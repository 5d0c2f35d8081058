"""Groups: matches that one call can replace together, and where in the graph that call can stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch.fx import Graph, Node

from fxopt.patterns.core import Search
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.calls import closure


class Member(Protocol):
    """A match that can share a call: the node it replaces and the nodes its replacement reads."""

    @property
    def anchor(self) -> Node: ...

    @property
    def reads(self) -> list[Node]: ...


M = TypeVar("M", bound=Member)


def alike(search: Search, members: Iterable[M], key: Callable[[M], object]) -> Iterator[list[M]]:
    """The groups of those that have one key."""
    by_key: dict[object, list[M]] = {}
    for member in members:
        by_key.setdefault(key(member), []).append(member)
    for same in by_key.values():
        yield from group(search.graph, same, search.aliases)


def group(graph: Graph, members: Sequence[M], aliases: Aliases) -> list[list[M]]:
    """As few groups as possible; within one, no member reads another, and one place suits them all."""
    groups: list[list[M]] = []
    for level in _levels(graph, members):
        while level:
            point = level[0].anchor
            together = [member for member in level if hoisted(point, member.reads, aliases) is not None]
            groups.append(together or level[:1])
            level = [member for member in level if member not in groups[-1]]
    return groups


def _levels(graph: Graph, members: Sequence[M]) -> list[list[M]]:
    """Members by the longest chain of members before them. depth[n]: that chain's length at node n."""
    by_anchor = {member.anchor: member for member in members}
    depth: dict[Node, int] = {}
    levels: list[list[M]] = []
    for node in graph.nodes:
        member = by_anchor.get(node)
        reads = member.reads if member is not None else node.all_input_nodes
        depth[node] = max((depth[read] for read in reads), default=0)
        if member is not None:
            while len(levels) <= depth[node]:
                levels.append([])
            levels[depth[node]].append(member)
            depth[node] += 1
    return levels


def hoisted(point: Node, reads: Sequence[Node], aliases: Aliases) -> list[Node] | None:
    """The nodes that must move before `point` for a call there to read `reads`; None where one may not move."""
    late = behind(point, reads)
    if point in late or not all(map(is_pure, late)):
        return None
    touched = (each for node in late for each in (node, *node.all_input_nodes))
    return None if any(map(aliases.edited, touched)) else sorted(late)


def behind(point: Node, reads: Iterable[Node]) -> set[Node]:
    """Of `reads` and all that they need, what does not stand before `point`."""

    def late(nodes: Iterable[Node]) -> Iterator[Node]:
        return (node for node in nodes if not node < point)

    return closure(late(reads), lambda node: late(node.all_input_nodes))
