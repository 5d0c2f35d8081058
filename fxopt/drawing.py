"""A graph as a picture: boxes in levels, each below what it reads."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from statistics import fmean

from torch._ops import OpOverload
from torch.fx import Graph, Node

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 200, 46, 12, 34  # of a box, and between boxes, in pixels
_MOST_IN_A_ROW = 12
_LETTERS = 32  # that a box has room for
_STYLE = """
  svg { background: white; color: black; font: 11px sans-serif } rect { fill: white; stroke: currentColor }
  rect.input { rx: 14px } text { fill: currentColor } path { fill: none; stroke: currentColor; opacity: 0.35 }
  @media (prefers-color-scheme: dark) { svg { background: #181818; color: #ddd } rect { fill: #181818 } }
"""


def svg(graph: Graph) -> str:
    """A box a node, round where it is an input. A pointer over it shows the rest: its line, and the state it reads."""
    shown = [node for node in graph.nodes if not _is_state(node)]
    places = _places(shown)
    wide = max((x for x, _ in places.values()), default=0) + _WIDTH + _GAP_X
    high = max((y for _, y in places.values()), default=0) + _HEIGHT + _GAP_Y
    edges = [_edge(places[read], places[node]) for node in shown for read in _reads(node)]
    boxes = [_box(node, *places[node]) for node in shown]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}"><style>{_STYLE}</style>'
    return "\n".join([head, *edges, *boxes, "</svg>"]) + "\n"


def shape_text(node: Node) -> str:
    """The dtype and the shape of a node's value: "float32[s0, 64]". Empty where it is no tensor."""
    value = node.meta.get("val")
    shape = getattr(value, "shape", None)
    return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}" if shape is not None else ""  # type: ignore[union-attr]


def _is_state(node: Node) -> bool:
    """Parameters, buffers, and the plans of operators."""
    return node.op == "get_attr" or "state" in node.meta


def _reads(node: Node) -> list[Node]:
    return [read for read in node.all_input_nodes if not _is_state(read)]


def _places(nodes: list[Node]) -> dict[Node, tuple[int, int]]:
    """The upper left corner of each node: levels are rows, and a node stands near what it reads."""
    rows = defaultdict[int, list[Node]](list)
    for node, level in _levels(nodes).items():
        rows[level].append(node)
    places, y = dict[Node, tuple[int, int]](), _GAP_Y // 2
    for level in sorted(rows):
        row = sorted(rows[level], key=lambda node: fmean([places[read][0] for read in _reads(node)] or [0]))
        for start in range(0, len(row), _MOST_IN_A_ROW):
            for number, node in enumerate(row[start : start + _MOST_IN_A_ROW]):
                places[node] = _GAP_X + number * (_WIDTH + _GAP_X), y
            y += _HEIGHT + _GAP_Y
    return places


def _levels(nodes: list[Node]) -> dict[Node, int]:
    """Each below what it reads; what reads nothing is right above its first reader."""
    levels = dict[Node, int]()
    for node in nodes:
        levels[node] = 1 + max((levels[read] for read in _reads(node)), default=-1)
    for node in nodes:
        if not _reads(node):
            levels[node] = max(0, min((levels[user] for user in node.users), default=1) - 1)
    return levels


def _box(node: Node, x: int, y: int) -> str:
    told = [node.name, _called(node), shape_text(node)]
    state = "\n".join(f"reads {read.name}: {shape_text(read)}" for read in node.all_input_nodes if _is_state(read))
    title = "\n".join(filter(None, [*told, str(node.meta.get("place", "")), state]))
    texts = [_text(text, x + 8, y + 14 + 13 * line) for line, text in enumerate(told)]
    kind = "call" if node.op.startswith("call") else "input"
    frame = f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" class="{kind}"/>'
    return f"<g><title>{escape(title)}</title>{frame}{''.join(texts)}</g>"


def _called(node: Node) -> str:
    if not node.op.startswith("call"):
        return node.op
    plain = isinstance(node.target, (str, OpOverload))
    return str(node.target) if plain else getattr(node.target, "__name__", str(node.target))


def _edge(read: tuple[int, int], by: tuple[int, int]) -> str:
    x0, y0, x1, y1 = read[0] + _WIDTH // 2, read[1] + _HEIGHT, by[0] + _WIDTH // 2, by[1]
    middle = (y0 + y1) // 2
    return f'<path d="M{x0} {y0}C{x0} {middle} {x1} {middle} {x1} {y1}"/>'


def _text(text: str, x: int, y: int) -> str:
    shown = text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."
    return f'<text x="{x}" y="{y}">{escape(shown)}</text>'
