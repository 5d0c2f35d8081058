"""A random model that reads one or two facts through chains, and a user who changes them between calls."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from tests.attacks.fragments.links import LINKS
from tests.attacks.fragments.place import Place
from tests.attacks.fragments.roots import ROOTS
from tests.attacks.fragments.uses import HEAD, KINDS, USES


@dataclass(frozen=True)
class Fragment:
    """The text of a model's module, and of what its user does between calls.

    Attributes:
        source: the module, in which $other is the name of a module of settings.
        changes: statements, for a namespace with the model as `m`.
        parts: the names of what it was made from.
    """

    source: str
    changes: tuple[str, ...]
    parts: tuple[str, ...]


def _fill(text: str, **values: str) -> str:
    return string.Template(text).safe_substitute(values)


class _Chain:
    """root.link.link...: the expression that reads a fact, and the statements that change it."""

    def __init__(self, draw: random.Random, number: int) -> None:
        self.draw = draw
        self.kind = draw.choices(list(KINDS), (6, 1, 1, 1))[0]
        root = draw.choice(list(ROOTS))
        depth = draw.choices((0, 1, 2, 3), (2, 4, 3, 1))[0]
        known = [name for name, link in LINKS.items() if self.kind == "number" or not link.number]
        links = [draw.choice(known) for _ in range(depth)]
        plain = [name for name in links if not LINKS[name].number]
        links = plain + [name for name in links if LINKS[name].number][:1]  # a number's holder is the innermost
        self.names = (root, *links, self.kind)
        self.i = [str(10 * number + place) for place in range(len(links) + 1)]
        self.root, self.links = ROOTS[root], [LINKS[name] for name in links]
        self.default = self.made(0, self.value())  # where nothing is there

    def value(self) -> str:
        return self.draw.choice(KINDS[self.kind])

    def made(self, level: int, leaf: str) -> str:
        """The expression for what is held at this level: 0 is what the root holds."""
        for place, link in reversed(list(enumerate(self.links))[level:]):
            leaf = _fill(link.make, V=leaf, i=self.i[place + 1])
        return leaf

    def read(self, level: int, owner: str = "self") -> str:
        text = _fill(self.root.read, i=self.i[0], V=self.default)
        if owner != "self":
            text = text.replace("self.", owner + ".").replace("(self", "(" + owner)
        for place, link in list(enumerate(self.links))[:level]:
            text = _fill(link.read, H=text, i=self.i[place + 1])
        return text

    def top(self) -> str:
        parts: list[tuple[Place, int]] = [(self.root, 0), *((link, n + 1) for n, link in enumerate(self.links))]
        first = [_fill(p.top, i=self.i[n]) for p, n in parts[1:]]
        return "\n".join([*first, _fill(self.root.top, i=self.i[0], V=self.made(0, self.value()))])

    def change(self) -> str:
        levels = [n for n, part in enumerate((self.root, *self.links)) if part.puts]
        level = self.draw.choice(levels)
        if level == 0:
            return _fill(self.draw.choice(self.root.puts), i=self.i[0], V=self.made(0, self.value()))
        link = self.links[level - 1]
        holder = self.read(level - 1, "m").replace("$x", "torch.ones(3, 4)")
        return _fill(self.draw.choice(link.puts), H=holder, V=self.made(level, self.value()), i=self.i[level])


def fragment(seed: int, changes: int = 5) -> Fragment:
    draw = random.Random(seed)
    chains = [_Chain(draw, number) for number in range(1, draw.choice((2, 2, 3)))]
    source = [HEAD, *(chain.top() for chain in chains)]
    init = [_fill(chain.root.make, i=chain.i[0], V=chain.made(0, chain.value())) for chain in chains]
    body = [_fill(chain.root.body, i=chain.i[0], V=chain.made(0, chain.value())) for chain in chains]
    lines, helpers = [], []
    for number, chain in enumerate(chains):
        fact, lines_of, method = _reading(draw, chain, number)
        use = draw.choice(USES[chain.kind])
        lines += [*lines_of, f"x = {_fill(use, V=fact, x='x')}"]
        helpers += method
    source += [_fill(_MODEL, init=_indented(init, 2), body=_indented(body + helpers, 1), forward=_indented(lines, 2))]
    return Fragment(
        "\n".join(source).replace("$x", "x"),
        tuple(draw.choice(chains).change() for _ in range(changes)),
        tuple(name for chain in chains for name in chain.names),
    )


def _reading(draw: random.Random, chain: _Chain, number: int) -> tuple[str, list[str], list[str]]:
    """How forward comes by a fact: the expression, statements in front of it, and methods that it calls."""
    text = chain.read(len(chain.links))
    way = draw.choice(("inline", "local", "method", "nested", "lambda", "listed", "assert"))
    if way == "local":
        return f"v{number}", [f"v{number} = {text}"], []
    if way == "method":
        return f"self.fact_{number}(x)", [], [f"def fact_{number}(self, x):\n    return {text}"]
    if way == "nested":
        return f"n{number}()", [f"def n{number}():\n    return {text}"], []
    if way == "lambda":
        return f"(lambda: {text})()", [], []
    if way == "listed":
        return f"[{text} for _ in range(1)][0]", [], []
    if way == "assert":
        return f"v{number}", [f"v{number} = {text}", f"assert v{number} is not Ellipsis"], []
    return text, [], []


def _indented(blocks: list[str], depth: int) -> str:
    lines = [line for block in blocks for line in block.splitlines()]
    return "\n".join("    " * depth + line for line in lines)


_MODEL = """
class Model(*BASES, nn.Module):
$body

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layer0, self.layer1 = nn.Linear(4, 4), nn.Linear(4, 4)
$init

    def forward(self, x):
$forward
        return x
"""
