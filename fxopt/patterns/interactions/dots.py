"""Dot interactions: dot products of many pairs of fields, and the cat that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.patterns.cats import Join
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.interactions import movement, products
from fxopt.patterns.interactions.terms import MOST_FIELDS, NOTHING, Terms, Value
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import same_shape, shape_of, tensor_of
from fxopt.shape.view_operators import SPLITS, through

aten = torch.ops.aten
_CONTRACTIONS = {aten.bmm.default, aten.matmul.default, aten.einsum.default, aten.sum.dim_IntList}
_FEWEST_PAIRS = 3
_MOST_LANES = 4096
_LOOKUPS = {aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx, aten.index.Tensor}


@dataclass(frozen=True)
class Dots:
    """The dot products of the pairs (i, j) of vectors, in order.

    vectors: nodes [B, F, D] or [B, D], numbered one after the other; to be joined where there are several.
    i, j: int64 [P], or nodes of such lists that may change.
    """

    vectors: tuple[Node, ...]
    i: Tensor | Node
    j: Tensor | Node


def find_dots(search: Search) -> Iterator[Match | Reject]:
    """Every interaction, with the cat behind it if nothing else reads it."""
    if search.changes_modes:
        return
    aliases = search.aliases
    terms = Terms(aliases, movement.RULES | products.RULES)
    path, ends = _followed(search.graph, terms)
    for join, run in _cats(ends, aliases):
        yield from _match(run, join, path, aliases, terms)
        for end in run:
            del ends[end]
    for end in ends:
        yield from _match([end], None, path, aliases, terms)


def _followed(graph: Graph, terms: Terms) -> tuple[set[Node], dict[Node, None]]:
    """(all dot products, those of them that are not just moved about further)."""
    path: set[Node] = set()
    ends: dict[Node, None] = {}
    for node in graph.nodes:
        if _live_pairs(node, terms) is not None or _is_dots(node, terms, path):
            path.add(node)
            if not any(_continues(user, node, terms) for user in node.users):
                ends[node] = None
    return path, ends


def _cats(ends: dict[Node, None], aliases: Aliases) -> Iterator[tuple[Join, list[Node]]]:
    """Cats of rows, each with the longest run of dot products among its inputs, which nothing else reads."""
    users = [next(iter(end.users)) for end in ends if len(end.users) == 1]
    for user in dict.fromkeys(users):
        join = Join.of(user)
        if join is None or join.is_stack or join.dim != 1 or len(shape_of(user)) != 2 or aliases.edited(user):
            continue
        runs: list[list[Node]] = [[]]
        for item in join.inputs:
            if item in ends and len(item.users) == 1 and join.inputs.count(item) == 1:
                runs[-1].append(item)
            elif runs[-1]:
                runs.append([])
        yield join, max(runs, key=len)


def _is_dots(node: Node, terms: Terms, path: set[Node]) -> bool:
    if node.target not in _CONTRACTIONS and path.isdisjoint(node.all_input_nodes):
        return False
    value = terms.of(node)
    return value is not None and value.is_dots


def _continues(user: Node, node: Node, terms: Terms) -> bool:
    """Whether a user of dot products only moves them about."""
    value = terms.of(user) if tensor_of(user) is not None else None
    if _is_pieces(user):
        return any(_continues(piece, user, terms) for piece in user.users)
    return (value is not None and value.is_dots) or _live_pairs(user, terms) is not None


def _dots(ends: list[Node], terms: Terms) -> Dots | Reject | None:
    """The pairs behind some dot products, one after the other."""
    if len(ends) == 1 and (live := _live_pairs(ends[0], terms)) is not None:
        return live
    values = [value for end in ends if (value := terms.known(end)) is not None and value.is_dots]
    if len(values) < len(ends) or any(value.axes[0] != "b" for value in values):
        return None
    pairs = torch.cat([value.terms.reshape(-1, 2) for value in values])
    if len(pairs) < _FEWEST_PAIRS or (len(ends) == 1 and _is_matrix(ends[0], values[0])):
        return None
    if bool((pairs == NOTHING).any()):
        return Reject("some of its products are masked out, and read", ends[0])
    used = sorted(set(pairs.flatten().tolist()))
    if len(pairs) < len(used) or bool((pairs[:, 0] == pairs[:, 1]).all()):
        return None  # few of all the pairs, or squares: no matrix pays
    vectors = joint_vectors(used, terms)
    if isinstance(vectors, Reject):
        return vectors
    if sum(len(_numbers(node, terms)) for node in vectors) > MOST_FIELDS or values[0].D > _MOST_LANES:
        return Reject("its vectors are too many or too long", ends[0])
    i, j = numbered(pairs, vectors, terms)
    return Dots(vectors, i, j)


def numbered(pairs: Tensor, vectors: tuple[Node, ...], terms: Terms) -> tuple[Tensor, Tensor]:
    """The pairs [P, 2] by the places that their vectors have in `vectors`, one after the other."""
    held = [term for node in vectors for term in _numbers(node, terms)]
    place = {term: at for at, term in enumerate(held)}
    i, j = (torch.tensor([place[term] for term in column.tolist()], device="cpu") for column in pairs.unbind(1))
    return i, j


def joint_vectors(used: list[int], terms: Terms) -> tuple[Node, ...] | Reject:
    """Tensors that together hold these vectors: one that has them all, or those that a stack can join."""
    if (container := _container(used, terms)) is not None:
        return container
    vectors = tuple(dict.fromkeys(terms.fields[term][0] for term in used))
    if any(len(_numbers(node, terms)) > 1 for node in vectors):
        return Reject("products of two different tensors", vectors[0])
    return vectors


def _is_matrix(node: Node, value: Value) -> bool:
    """A whole matrix of products is what a matrix product is for."""
    return value.axes == "bff" and node.target in _CONTRACTIONS and 1 not in value.terms.shape[:2]


def _numbers(node: Node, terms: Terms) -> list[int]:
    value = terms.known(node)
    assert value is not None
    return value.terms.flatten().tolist()


def _container(used: list[int], terms: Terms) -> tuple[Node] | None:
    """A tensor [B, F, D] that has all these vectors, each once: a stack, or one of the tensors they come from."""
    wanted, best = set(used), None
    for node, value in terms.values():
        if value.axes != "bfl" or value.terms.shape[-1] != 1:
            continue
        held = value.terms.flatten().tolist()
        if wanted <= set(held) and len(set(held)) == len(held) and (best is None or len(held) < best[0]):
            best = len(held), node
    return (best[1],) if best else None


def _live_pairs(node: Node, terms: Terms) -> Dots | None:
    """gram[:, i, j] with lists that may change between calls: buffers."""
    if node.target is not aten.index.Tensor:
        return None
    gram, indices = node.args[:2]
    value = terms.known(gram) if isinstance(gram, Node) else None
    if value is None or value.axes != "bff" or not value.is_dots or not isinstance(indices, list | tuple):
        return None
    lists = [index for index in indices if isinstance(index, Node) and _is_list(index)]
    if len(indices) != 3 or indices[0] is not None or len(lists) != 2 or not same_shape(*lists):
        return None
    rows, columns = value.terms[:, 0, 0].tolist(), value.terms[0, :, 1].tolist()
    container = _container(rows, terms)
    if container is None or not rows == columns == _numbers(container[0], terms):
        return None
    return Dots(container, *lists)


def _is_list(index: Node) -> bool:
    value = index.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == torch.int64


def _used_elsewhere(ends: list[Node], path: set[Node]) -> Reject | None:
    """Products that something else reads are computed anyway."""
    inside, stack = set(ends), list(ends)
    while stack:
        for source in stack.pop().all_input_nodes:
            whole = source.args[0] if _is_pieces(source) else source
            for node in (source, whole):
                if whole in path and node not in inside:
                    inside.add(node)  # type: ignore[arg-type]
                    stack.append(node)  # type: ignore[arg-type]
    for node in inside.difference(ends):
        if not inside.issuperset(node.users):
            return Reject("its products are read elsewhere too", node)
    return None


def _is_pieces(node: Node) -> bool:
    return node.target is aten.unbind.int or node.target in SPLITS


def _match(
    ends: list[Node], join: Join | None, path: set[Node], aliases: Aliases, terms: Terms
) -> Iterator[Match | Reject]:
    dots = _dots(ends, terms)
    if dots is None:
        return
    found = dots if isinstance(dots, Reject) else _used_elsewhere(ends, path)
    if isinstance(found, Reject):
        yield found
        return
    assert isinstance(dots, Dots)
    if any(map(aliases.edited, dots.vectors)):
        yield Reject("its vectors are edited in place", ends[0])
        return
    bound = {"vectors": dots.vectors, "i": dots.i, "j": dots.j, "before": (), "after": (), "inside": False}
    if join is not None:
        at = join.inputs.index(ends[0])
        bound |= {"before": join.inputs[:at], "after": join.inputs[at + len(ends) :]}
        bound["inside"] = _takes(join, ends, dots, aliases, terms)
    yield Match(ends[0] if join is None else join.node, bound)


def _takes(join: Join, ends: list[Node], dots: Dots, aliases: Aliases, terms: Terms) -> bool:
    """Whether the cat's row can be written by the interaction: nothing beside it that the columns would write."""
    beside = [item for item in join.inputs if item not in ends]
    if any(map(aliases.edited, beside)):
        return False
    bases = set(dots.vectors) | {terms.fields[number][0] for node in dots.vectors for number in _numbers(node, terms)}
    return all(_base(item) in bases or _base(item).target not in _LOOKUPS for item in beside)


def _base(node: Node) -> Node:
    while (viewed := through(node)) is not None:
        node = viewed[0]
    return node
