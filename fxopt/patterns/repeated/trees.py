"""What lanes are packed into: a tree of calls, whose leaves read all lanes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

Lanes = tuple[Node, ...]


@dataclass(frozen=True)
class Shared:
    """One tensor that every lane reads."""

    node: Node


@dataclass(frozen=True)
class Pool:
    """What leaves read from: pieces of `dim` of tensors of one shape, or (dim None) whole tensors, stacked.

    kind: "pieces", "lookup" (of a table), "looked up" (a piece of a lookup), or "state" (a parameter or buffer).
    Leaves of equal pools that have tensors in common read one joint tensor.
    """

    kind: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    dim: int | None


@dataclass(frozen=True)
class Leaf:
    """Lane l reads `size` entries (None: one, and not its dim) of bases[l] from starts[l] on."""

    pool: Pool
    bases: Lanes
    starts: tuple[int, ...]
    size: int | None
    rank: int


@dataclass(frozen=True)
class Picked:
    """Lanes that repeat: lane l is index[l] of `tree`."""

    tree: Tree
    index: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """The calls `lanes`, alike but for their tensor arguments. args: a tree, or a constant."""

    lanes: Lanes
    args: tuple[Any, ...]

    @property
    def node(self) -> Node:
        return self.lanes[0]

    @property
    def target(self) -> OpOverload:
        assert isinstance(self.node.target, OpOverload)
        return self.node.target


Tree = Shared | Leaf | Picked | Call


def operands_of(node: Node) -> tuple[Any, Any]:
    """(input, weight) of a linear."""
    return node.args[0], node.args[1]


def reads_of(trees: Sequence[Tree]) -> Iterator[Node]:
    """Every node that the packed calls read."""
    for leaf in leaves_of(trees):
        yield from [leaf.node] if isinstance(leaf, Shared) else leaf.bases


def leaves_of(trees: Sequence[Tree]) -> Iterator[Shared | Leaf]:
    for tree in trees:
        if isinstance(tree, Call):
            yield from leaves_of([argument for argument in tree.args if isinstance(argument, Tree)])
        elif isinstance(tree, Picked):
            yield from leaves_of([tree.tree])
        else:
            yield tree
