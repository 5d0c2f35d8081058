"""A graph as a picture: operators in parts, and parts that look alike in one block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Graph, Node

from fxopt.findings import Place
from fxopt.report.data import Block
from fxopt.report.kinds import COLUMNS, INDEX, name_of, runs
from fxopt.report.own_time import OwnTimes
from fxopt.shape.sizes import static, tensors_in

_FEW = 4  # an operator that reads more parts than these collects them, and is a part of its own
_MOST_STEPS = 60  # that one part shows
_DTYPES = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c"}


@dataclass
class _Item:
    """One operator, and the numbers of those whose results it reads."""

    node: Node
    kind: str
    reads: list[int]


@dataclass
class _Part:
    items: list[_Item] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    level: int = 0

    @property
    def form(self) -> tuple[object, ...]:
        """What parts of one block have in common. Levels keep a block from reading itself."""
        return self.level, self.kind, *(described(item.node) for item in self.items)

    @property
    def kind(self) -> str:
        kinds = {item.kind for item in self.items}
        return COLUMNS if COLUMNS in kinds else self.items[-1].kind


def blocks(graph: Graph, kinds: Mapping[Node, str], own: Mapping[int, OwnTimes]) -> tuple[Block, ...]:
    """The blocks of a graph, each behind those that it reads.

    A chain of operators of one kind, each read by the next alone, is one part, and so is a lookup with what prepares
    its ids. Contracting an edge into the only reader makes no cycle.

    Args:
        own: by batch size.
    """
    parts = _parts(_items(graph, kinds))
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        alike[part.form].append(number)
    ordered = sorted(alike.values(), key=lambda numbers: (parts[numbers[0]].level, numbers[0]))
    block_of = {number: place for place, numbers in enumerate(ordered) for number in numbers}
    return tuple(_block([parts[number] for number in numbers], block_of, own) for numbers in ordered)


def described(node: Node) -> str:
    """An operator and its results: "linear f32[B, 512]"."""
    values = tensors_in(node)
    shown = ", ".join(map(_tensor, values[:2])) + (f" and {len(values) - 2} more" if len(values) > 2 else "")
    return f"{_name(node)} {shown}".strip()


def _name(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return name_of(node) or getattr(node.target, "__name__", str(node.target))


def _tensor(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    unknown = ["B" if not place else "*" for place in range(value.dim())]
    known = map(static, value.shape)
    shape = ", ".join(letter if size is None else str(size) for letter, size in zip(unknown, known, strict=True))
    return f"{_DTYPES.get(letters, letters)}{name.removeprefix(letters)}[{shape}]"


def _items(graph: Graph, kinds: Mapping[Node, str]) -> list[_Item]:
    items: list[_Item] = []
    _walk(graph, kinds, [()] * len(graph.find_nodes(op="placeholder")), items)
    return items


def _walk(
    graph: Graph, kinds: Mapping[Node, str], inputs: Sequence[Iterable[int]], items: list[_Item]
) -> dict[Node, list[int]]:
    """Appends the operators of a graph; functions of a graph stand for theirs. Which items each node is made by."""
    made: dict[Node, list[int]] = {}
    given = iter(inputs)
    for node in graph.nodes:
        reads = list(dict.fromkeys(number for read in node.all_input_nodes for number in made[read]))
        if node.op == "placeholder":
            made[node] = list(next(given))
        elif "inner" in node.meta:
            inner = [made[argument] if isinstance(argument, Node) else () for argument in node.args]
            inside = _walk(node.meta["inner"], kinds, inner, items)
            made[node] = inside[next(iter(node.meta["inner"].find_nodes(op="output")))]
        elif runs(node):
            items.append(_Item(node, kinds[node], reads))
            made[node] = [len(items) - 1]
        else:
            made[node] = reads
    return made


def _parts(items: Sequence[_Item]) -> list[_Part]:
    readers = defaultdict[int, set[int]](set)
    for number, item in enumerate(items):
        for read in item.reads:
            readers[read].add(number)
    part_of = list(range(len(items)))
    for number in reversed(range(len(items))):
        if len(readers[number]) == 1:
            (reader,) = readers[number]
            if _together(items[number], items[reader]):
                part_of[number] = part_of[reader]
    numbers = {last: place for place, last in enumerate(sorted(set(part_of)))}
    parts = [_Part() for _ in numbers]
    for item, last in zip(items, part_of, strict=True):
        parts[numbers[last]].items.append(item)
        parts[numbers[last]].reads |= {numbers[part_of[read]] for read in item.reads} - {numbers[last]}
    for part in parts:  # the last item of a part is behind those of all parts that it reads
        part.level = 1 + max((parts[read].level for read in part.reads), default=-1)
    return parts


def _together(item: _Item, reader: _Item) -> bool:
    if len(reader.reads) > _FEW:
        return False
    return item.kind == reader.kind or (item.kind == INDEX and reader.kind == COLUMNS)


def _block(parts: Sequence[_Part], block_of: Mapping[int, int], own: Mapping[int, OwnTimes]) -> Block:
    nodes = [item.node for part in parts for item in part.items]
    steps = [described(item.node) for item in parts[0].items]
    if len(steps) > _MOST_STEPS:
        steps = [*steps[:_MOST_STEPS], f"and {len(steps) - _MOST_STEPS} more operators"]
    places = [_place(part) for part in parts]
    return Block(
        parts[0].kind,
        tuple(steps),
        tuple((place.module, place.line) for place in places),
        tuple(sorted({block_of[read] for part in parts for read in part.reads})),
        {batch: sum(found.seconds.get(node, 0.0) for node in nodes) for batch, found in own.items()},
        {batch: sum(found.bytes.get(node, 0) for node in nodes) for batch, found in own.items()},
        {batch: sum(found.operations.get(node, 0) for node in nodes) for batch, found in own.items()},
    )


def _place(part: _Part) -> Place:
    """Of the first operator that has one with a line."""
    places = [item.node.meta.get("place", Place()) for item in part.items]
    return next((place for place in reversed(places) if place.line), places[-1])
