"""Parts of a graph on CUDA that need not wait for one another: what two operands of a node are made by.

Lookups beside a bottom MLP, crosses and factorization machines beside a deep tower, experts, towers of users and items,
the padding of a weight beside what stands in front of its layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import reduce

from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import has_effects, is_random
from fxopt.shape.sizes import tensors_in
from fxopt.torch_internals.storage import shares_storage

SIDE = "side"  # in the meta of a branch's nodes: which branch
BESIDE = "beside"  # in the meta of those that it was found to run beside
_MOST_BESIDE = 2  # operators for each of the branch: more of them wait for nothing and would only be timed


def find_branches(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `side` and the `main` that it may run beside, anchored where both are needed.

    Both in graph order, and closed: who stands between two of them is one. Those that save most waiting come first.
    """
    nodes = list(search.graph.nodes)
    if not search.inference or not any(map(launches, nodes)):
        return
    if writer := next(filter(_may_write, nodes), None):
        yield Reject(f"'{writer.name}' may write to memory, so the graph runs in the order of its calls", writer)
        return
    cones = _Cones(nodes)
    found = [(node, branch) for node in nodes if (branch := cones.branch_at(node)) is not None]
    for node, branch in sorted(found, key=lambda each: -sum(map(launches, each[1]["side"]))):
        yield Match(node, branch)


class _Cones:
    """What each node needs, itself included, as the bits of their places in the graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.place = {node: place for place, node in enumerate(nodes)}
        self.needs: list[int] = []
        self.launches = self.fixed = 0
        for place, node in enumerate(nodes):
            bit = 1 << place if node.op == "call_function" else 0
            self.needs.append(reduce(operator.or_, (self.needs[self.place[n]] for n in node.all_input_nodes), bit))
            self.launches |= bit if launches(node) else 0
            self.fixed |= bit if not _may_move(node) else 0

    def branch_at(self, node: Node) -> dict[str, list[Node]] | None:
        """What the operands of a node need, less what several of them do, as two sides of about as many launches."""
        cones = [cone for n in node.all_input_nodes if (cone := self.needs[self.place[n]]) & self.launches]
        if len(cones) < 2:
            return None
        several = _in_several(cones)
        left = right = 0
        for cone in sorted(cones, key=lambda cone: -self._count(cone & ~several)):
            if self._count(left & ~several) <= self._count(right & ~several):
                left |= cone
            else:
                right |= cone
        side, main = sorted((self._movable(left & ~right), self._movable(right & ~left)), key=self._count)
        if not self._count(side):
            return None
        main = self._last(main, _MOST_BESIDE * self._count(side))
        return {"side": self._with_items(side), "main": self._with_items(main)}

    def _movable(self, bits: int) -> int:
        """Less what has to stay, and what that needs."""
        for place in _places(bits & self.fixed):
            bits &= ~self.needs[place]
        return bits

    def _last(self, bits: int, launches: int) -> int:
        """So many launches at the end, and what stands between them."""
        places = list(_places(bits & self.launches))
        return bits >> places[-launches] << places[-launches] if launches < len(places) else bits

    def _with_items(self, bits: int) -> list[Node]:
        """In graph order, and with all items of a list that a node gives."""
        found = {self.nodes[place] for place in _places(bits)}
        users = {user for node in found if isinstance(node.meta.get("val"), list | tuple) for user in node.users}
        return sorted(found | {user for user in users if user.target is operator.getitem})

    def _count(self, bits: int) -> int:
        return (bits & self.launches).bit_count()


def _in_several(cones: Sequence[int]) -> int:
    once = several = 0
    for cone in cones:
        several |= once & cone
        once |= cone
    return several


def _places(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _may_write(node: Node) -> bool:
    """Whether it may write to memory: then it keeps its place, and all others theirs around it."""
    return node.op == "call_module" or (node.op == "call_function" and has_effects(node))


def launches(node: Node) -> bool:
    """Whether the device works for it: it gives tensors on CUDA that are no views of what it reads."""
    tensors = tensors_in(node)
    if node.op != "call_function" or not any(tensor.is_cuda for tensor in tensors):
        return False
    read = [tensor for needed in node.all_input_nodes for tensor in tensors_in(needed)]
    return not all(any(shares_storage(tensor, other) for other in read) for tensor in tensors)


def _may_move(node: Node) -> bool:
    """It is not part of a branch yet, and works on CUDA alone; a plan on the host is a constant."""
    if SIDE in node.meta or BESIDE in node.meta or is_random(node):
        return False
    read = [n for n in node.all_input_nodes if n.op != "get_attr"]
    return all(tensor.is_cuda for each in (node, *read) for tensor in tensors_in(each))
