"""The same small computation many times into one collector: what a Python loop over fields leaves behind.

A collector is a cat, a stack, or a left-deep sum. Its operands are the lanes; lanes that compute alike, each on
slices, lookups or weights of its own, are packed from the collector backwards, an operator of every lane at a time
(superword-level parallelism: Larsen and Amarasinghe, PLDI'00; here a tensor axis is the superword).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxopt.normalize import switches_gradients
from fxopt.patterns.core import Match, Reject, Search, devices
from fxopt.patterns.repeated.lanes import FEWEST, NotPacked, Packing
from fxopt.patterns.repeated.rowwise import is_rowwise, rows_of
from fxopt.patterns.repeated.trees import Call, Lanes, Leaf, Tree, leaves_of, operands_of, reads_of
from fxopt.shape.sizes import product, shape_of, static, tensor_of
from fxopt.shape.view_operators import joined_dim

aten = torch.ops.aten
# Bytes a row. malloc keeps 32 MB, 4096 rows; the kernel zeroes more at each call. ONN, 41 KB a row: 0.92 to 1.1x.
_MOST_JOINED = 8192


@dataclass(frozen=True)
class Run:
    """Neighbouring operands of a collector that are packed together."""

    lanes: Lanes
    tree: Tree


@dataclass(frozen=True)
class Collector:
    """kind: "cat", "stack" or "sum"; dim counts from the front, of the collector's own result."""

    kind: str
    dim: int
    operands: tuple[Node, ...]


def find_repeated(search: Search) -> Iterator[Match | Reject]:
    """Matches bind the collector, its parts (a Run, or an operand that stays), and what will be read.

    Those of :func:`find_lookups_on_cuda` are left out.
    """
    for found in _find(search, devices(search.inference)):
        if isinstance(found, Reject) or not (found.on_cuda and _looks_up_pieces(found)):
            yield found


def find_lookups_on_cuda(search: Search) -> Iterator[Match]:
    """Those on GPUs whose lanes are cut from lookups, which becomes lookups of ids that are cut out."""
    for found in _find(search, ("cuda",)) if search.inference else ():
        if isinstance(found, Match) and _looks_up_pieces(found):
            yield found


def _looks_up_pieces(match: Match) -> bool:
    leaves = leaves_of([part.tree for part in match.bound["parts"] if isinstance(part, Run)])
    return any(isinstance(leaf, Leaf) and leaf.pool.kind == "looked up" for leaf in leaves)


def _find(search: Search, devices: tuple[str, ...]) -> Iterator[Match | Reject]:
    if switches_gradients(search.graph):
        return
    packing = Packing(search.aliases)
    for node in search.graph.nodes:
        collector = _collector(node)
        if collector is None or node.meta["val"].device.type not in devices:
            continue
        try:
            parts = list(_parts(collector, packing, whole=node.meta["val"].is_cuda))
        except NotPacked as error:
            yield Reject(str(error), error.node)
            continue
        trees = [part.tree for part in parts if isinstance(part, Run)]
        if trees:
            bound = {"collector": collector, "parts": parts, "reads": list(reads_of(trees))}
            yield Match(node, bound | {"rowwise": _is_rowwise(node, collector, parts)})


def freed(graph: Graph, anchor: Node) -> int:
    """How many operators nobody needs once `anchor` is replaced; those whose result is used elsewhere stay."""
    dead, unread = {anchor}, list(anchor.all_input_nodes)
    while unread:
        node = unread.pop()
        if node in dead or node.op != "call_function" or any(user not in dead for user in node.users):
            continue
        dead.add(node)
        unread.extend(node.all_input_nodes)
    return len(dead)


def _collector(node: Node) -> Collector | None:
    if tensor_of(node) is None or not node.meta["val"].is_floating_point():
        return None
    if node.target in (aten.cat.default, aten.stack.default):
        operands: Any = node.args[0]
        kind, dim = "cat" if node.target is aten.cat.default else "stack", joined_dim(node)
    elif node.target is aten.add.Tensor and not any(_is_sum(user) for user in node.users):
        operands, kind, dim = list(_terms(node)), "sum", 0
    else:
        return None
    if len(operands) < FEWEST or not all(isinstance(operand, Node) for operand in operands):
        return None
    return Collector(kind, dim, tuple(operands))


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs


def _is_rowwise(node: Node, collector: Collector, parts: Sequence[Run | Node]) -> bool:
    """Whether row b of all that is read makes row b of the result."""
    batch = shape_of(node)[0]
    if static(batch) is not None or (collector.kind != "sum" and collector.dim == 0):
        return False
    kept = [part for part in parts if isinstance(part, Node)]
    trees = [part.tree for part in parts if isinstance(part, Run)]
    return all(rows_of(operand, batch) for operand in kept) and all(is_rowwise(tree, batch) for tree in trees)


def _terms(node: Node) -> list[Node]:
    """The terms of a left-deep chain of additions; `0 + a`, as Python's sum() starts, is a."""
    terms: list[Node] = []
    while _is_sum(node) and isinstance(left := node.args[0], Node):
        right = node.args[1]
        if isinstance(right, Node):
            terms.append(right)
        elif right != 0:
            break
        if len(node.users) > 1 and terms[1:]:
            return []  # someone reads a sum of the first few
        node = left
    return [*terms, node][::-1]


def _parts(collector: Collector, packing: Packing, whole: bool) -> Iterator[Run | Node]:
    """Runs of operands that compute alike, packed, `whole` or cut where a processor's caches ask for it; operands of
    shorter runs as they are.
    """
    runs = [tuple(run) for _, run in itertools.groupby(collector.operands, packing.key)]
    if collector.kind == "sum" and len(runs) > 1:
        return
    for run in runs:
        if len(run) < FEWEST or not _has_lanes(run[0], collector) or not packing.computes(run[0]):
            yield from run
            continue
        alike = [run] if whole else _by_input(run, packing)
        if collector.kind != "sum" and not whole:
            alike = [part for lanes in alike for part in _of_size(lanes, packing)]
        for lanes in alike:
            tree = packing.pack(lanes)
            if isinstance(tree, Call):
                yield Run(lanes, tree)
            else:
                yield from lanes


def _has_lanes(operand: Node, collector: Collector) -> bool:
    return collector.kind != "cat" or static(shape_of(operand)[collector.dim]) is not None


def _of_size(run: Lanes, packing: Packing) -> Sequence[Lanes]:
    """The run, cut so that the rows which its lanes look up make joint tensors of a bearable size."""
    leaves = [leaf for leaf in leaves_of([packing.pack(run)]) if isinstance(leaf, Leaf) and leaf.pool.kind == "lookup"]
    bytes_a_row = sum(_bytes_a_row(base) for leaf in leaves for base in leaf.bases)
    count = max(1, min(-(-bytes_a_row // _MOST_JOINED), len(run) // FEWEST))
    size = -(-len(run) // count)
    return [run[start : start + size] for start in range(0, len(run), size)]


def _bytes_a_row(rows: Node) -> int:
    return rows.meta["val"].element_size() * (static(product(shape_of(rows)[1:])) or 1)


def _by_input(run: Lanes, packing: Packing) -> Sequence[Lanes]:
    """The run, cut where the input changes that neighbouring lanes have in common under weights of their own.

    One wide linear for each input: 325 bilinear pairs of 26 fields (dim 16) take 0.19 / 0.92 / 75 ms at batch 1 / 256 /
    4096, as one batched product 0.06 / 1.2 / 230 ms, lane by lane 1.45 / 6.8 / 168 ms: the wide ones never gather their
    inputs, and stay in the cache.
    """
    for calls in _linears(run, packing):
        inputs, weights = zip(*map(operands_of, calls), strict=True)
        cuts = [position for position in range(1, len(run)) if inputs[position] is not inputs[position - 1]]
        pieces = list(itertools.pairwise([0, *cuts, len(run)]))
        own = all(len(set(weights[start:stop])) == stop - start for start, stop in pieces)
        if own and len(pieces) <= len(run) // FEWEST:
            return [run[start:stop] for start, stop in pieces]
    return [run]


def _linears(lanes: Lanes, packing: Packing) -> Iterator[Lanes]:
    """The linears in the lanes, position by position."""
    if len(set(lanes)) < len(lanes) or not packing.is_call(lanes[0]):
        return
    if lanes[0].target is aten.linear.default:
        yield lanes
    for position, argument in enumerate(lanes[0].args):
        if isinstance(argument, Node):
            yield from _linears(tuple(lane.args[position] for lane in lanes), packing)  # type: ignore[misc]
