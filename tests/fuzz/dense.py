"""Random dense graphs of recommendation models: one integer is one program."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tests.fuzz import blocks, effects, indices, interactions, layers, moves, pointwise
from tests.fuzz.programs import Program, Sizes
from tests.fuzz.writer import SAMPLE, STATIC, Value, Writer

Statement = Callable[[Writer], Value | None]
ORDINARY: dict[Statement, int] = {
    layers.linear: 8,
    layers.recurrent: 3,
    layers.mlp: 10,
    layers.towers: 12,
    layers.cross: 5,
    layers.norm: 5,
    layers.product: 8,
    interactions.fields: 9,
    interactions.attention: 9,
    interactions.target: 7,
    pointwise.unary: 6,
    pointwise.binary: 7,
    pointwise.scaled: 5,
    pointwise.program: 6,
    pointwise.reduction: 8,
    pointwise.along: 6,
    pointwise.masked: 6,
    moves.move: 12,
    moves.scramble: 4,
    moves.join: 9,
    moves.parts: 3,
}
ODD: dict[Statement, int] = {
    indices.order: 4,
    indices.index: 4,
    indices.sized: 5,
    effects.edit: 5,
    effects.weight: 2,
    effects.counted: 3,
    effects.asked: 5,
    effects.checked: 4,
    blocks.block: 4,
    moves.scramble: 3,
    pointwise.scaled: 3,
}
DTYPES = (torch.float32,) * 7 + (torch.float64, torch.float64, torch.bfloat16)
LATER = (
    Sizes(1, 1),
    Sizes(2, 3),
    Sizes(3, 5),
    Sizes(7, 6),
    Sizes(5, 1, 1.0),
    Sizes(9, 4, 0.3),
    Sizes(1, 5),
    Sizes(6, 2),
)
EMPTY = (Sizes(0, 2), Sizes(2, 0), Sizes(0, 0), Sizes(3, 4, 0.0), Sizes(1, 3, 0.0))


def program(seed: int, gradients: bool | None = None) -> Program:
    """The program of a seed. gradients: with them, without, or (None) some with and some without."""
    r = random.Random(seed)
    torch.manual_seed(seed)  # what a line gives on the sample decides whether it stays
    dtype = r.choice(DTYPES)
    odd = r.choice((0, 0, 0, 15, 40))  # percent of the statements
    # One in ten is written at the sizes of its capture: what fits only there is an error later, and must be one.
    width = r.choice(STATIC)
    captured = _captured(r, width)
    w = Writer(r, dtype, width, captured if r.randrange(100) < 10 else SAMPLE)
    for _ in range(r.choice((1, 1, 2))):
        w.given(("B", w.size())) if w.chance(50) else w.cube()
    wanted = r.choice((1, 2, 2, 3, 3, 4, 5, 7))
    for _ in range(3 * wanted):
        if len(w.lines) >= wanted:
            break
        table = ODD if w.chance(odd) else ORDINARY
        statement = r.choices(list(table), list(table.values()))[0]
        statement(w)
    grad = w.chance(45) if gradients is None else gradients
    outputs = outputs_of(w)
    return w.finish(
        outputs,
        seed % 7,
        grad,
        training=w.chance(35),
        whole=w.chance(20),
        verify="first" if w.chance(4) else "off",
        example=w.chance(75),
        captured=captured,
        later=_later(r),
        many=seed % 2 == 1,
        nan=seed % 5 == 4,
    )


def _captured(r: random.Random, width: int) -> Sizes:
    """Batch and length of the capture: often the number that static sizes are, too."""
    batch = r.choice((width, width, 4, 4, 1, 2, 3, 6))
    length = r.choice((width, batch, batch, 4, 1, 3, 5))
    return Sizes(batch, length, r.choice((1.0, 0.6)))


def _later(r: random.Random) -> tuple[Sizes, ...]:
    """Two others; an empty one comes last, because it may need a capture of its own."""
    others = r.sample(LATER, 2)
    return (*others[:1], r.choice(EMPTY)) if r.randrange(100) < 30 else tuple(others)


_VIEWS = r"(?:\.\w+(?:\([^()]*\))?)*"
_WAYS = (
    rf"{_VIEWS}\[[^=]*\] [-+*/]?= ",
    rf"{_VIEWS}\.\w+_\(",
    " [-+*/]= ",
    ", inplace=True",
    r",.*\)\[\d\]\.\w+_\(",  # torch.unsafe_chunk(v1, 2)[0].mul_(0.5)
)
_ONE_OF = re.compile(r"\[\w+, \w+\](?=\[)")  # a list of which one is read
_AGAIN = re.compile(r"^except .*\n +v\d+ = ", re.M)  # a variable that try has made
_EDIT = re.compile(rf"^\s*(?:(?:F|torch)\.\w+\()?(v\d+)(?={'|'.join(_WAYS)})")


def unread_of(lines: Sequence[str]) -> list[str]:
    """Variables that are not read after they are made or edited; a dtype or a shape reads no element."""
    count: Counter[str] = Counter()
    for line in _AGAIN.sub("", _ONE_OF.sub("", "\n".join(lines))).splitlines():
        edit = _EDIT.match(line)
        if edit:
            count[edit[1]] = 1
        names = re.findall(r"\bv\d+\b(?!\.(?:dtype|shape)\b)", line)
        count.update(name for name in names if not edit or name != edit[1])
    return [name for name, times in count.items() if times == 1]


def outputs_of(w: Writer) -> list[Value]:
    """The variables that nothing reads (errors of dead statements are none in a graph), now and then one more, and one
    that is another one itself, or looks like it.
    """
    made = [v for v in w.values if v.name.startswith("v")]
    if not made:
        return w.values[-1:]
    unread = set(unread_of(w.lines))
    found = [v for v in made if v.name in unread] or made[-1:]
    if w.chance(25):
        found.append(w.pick(made))
    if w.chance(4):
        found.append(w.pick(w.values))
    if w.chance(12) and (alike := moves.same(w, w.pick(made))) is not None:
        found.append(alike)
    w.random.shuffle(found)
    return found
