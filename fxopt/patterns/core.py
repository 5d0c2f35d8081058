"""What every pattern speaks: a match, or a reason why not."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fxopt.findings import Miss, Place
from fxopt.normalize import switches_gradients
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import tensor_of
from fxopt.shape.standing import analysed
from fxopt.shape.strides import Strides


@dataclass(frozen=True)
class Reject:
    """Why something that looked like the pattern is not rewritten; `reason` says what a user can do about it."""

    reason: str
    node: Node

    def miss(self, pattern: str) -> Miss:
        return Miss(pattern, self.reason, place_of(self.node))


@dataclass(frozen=True)
class Match:
    """One place where a pattern holds.

    anchor: the node whose value the replacement gives.
    bound: what the replacement needs. The nodes that it reads stand there as nodes, or in tuples and lists (beside a
        dataclass that holds them), so that a match waits where an earlier one of its round has replaced one of them.
    """

    anchor: Node
    bound: dict[str, Any]

    @property
    def on_cuda(self) -> bool:
        value = tensor_of(self.anchor)
        return value is not None and value.is_cuda


@dataclass(frozen=True)
class Search:
    """What a pattern looks through: a graph that nobody edits meanwhile. inference: whether gradients are off."""

    graph: Graph
    inference: bool

    @functools.cached_property
    def aliases(self) -> Aliases:
        return analysed(self.graph, Aliases)

    @functools.cached_property
    def strides(self) -> Strides:
        return analysed(self.graph, Strides)

    @property
    def changes_modes(self) -> bool:
        """Whether gradients are recorded in some of its parts and not in others."""
        return not self.inference and switches_gradients(self.graph)

    def unedited(self, found: Match, nodes: Iterable[Node], node: Node, reason: str = "") -> Match | Reject:
        """What was found at `node`; why it is none where one of these nodes is edited in place."""
        edited = next(filter(self.aliases.edited, nodes), None)
        return found if edited is None else Reject(reason or f"'{edited.name}' is edited in place", node)

    def calls(self, target: Any) -> list[Node]:
        """The calls of an operator, in graph order."""
        return self.graph.find_nodes(op="call_function", target=target)


def devices(inference: bool) -> tuple[str, ...]:
    """Where a capture's nodes may lie for kernels that have gradients on the CPU alone."""
    return ("cpu", "cuda") if inference else ("cpu",)


def place_of(node: Node) -> Place:
    """Module path and source line of a node, as capture noted them."""
    return node.meta.get("place") or Place()


def is_ours(node: Node, name: str) -> bool:
    """Whether it calls "fxopt::columns", say. By name: before its library is loaded torch does not know it."""
    return getattr(node.target, "name", str)() == name


def calls_of_ours(graph: Graph, name: str) -> Iterator[Node]:
    return (node for node in graph.nodes if is_ours(node, name))
