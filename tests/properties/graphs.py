"""Random models: columns, shared tables and dense tensors, collected into outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.properties import columns
from tests.properties.inputs import LAYOUTS, Sizes
from tests.properties.programs import Program, Value, Writer

CAPTURED = (Sizes(5, 3), Sizes(1, 1), Sizes(2, 4), Sizes(8, 5))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A model of one to three columns."""
    return random_program(lambda options: options[draw(st.integers(0, len(options) - 1))])


def random_program(pick: Callable[[Sequence[Any]], Any]) -> Program:
    """The program that a series of choices spells."""
    w = Writer(pick)
    w.program.training = w.chance(50)
    w.program.grad = w.chance(65)
    w.program.sizes = w.pick(CAPTURED)
    dtype, dim = w.pick(columns.TABLES), w.pick(columns.DIMS)
    found = []
    for _ in range(w.pick((1, 1, 2, 2, 2, 3))):
        own = w.pick(columns.TABLES) if w.chance(5) else dtype
        value = _column(w, own, w.pick(columns.DIMS) if w.chance(30) else dim)
        if value is not None:
            found.append(value)
    if w.chance(15):
        found.extend(_again(w))
    return w.finish(_collected(w, found, dtype))


def _column(w: Writer, dtype: torch.dtype, dim: int) -> Value | None:
    kind = w.pick(("lookup", "lookup", "lookup", "lanes", "bag", "bag", "pooled", "pooled", "fields"))
    if kind == "lookup":
        return columns.lookup(w, dtype, dim, one_dim=True)
    if kind == "lanes":
        return columns.lookup(w, dtype, dim, one_dim=False)
    return {"bag": columns.bag, "pooled": columns.pooled, "fields": columns.offset_fields}[kind](w, dtype, dim)


def _again(w: Writer) -> list[Value]:
    """A table of the model, looked up once more by other ids: shared weights."""
    plain = [name for name, table in w.program.tables.items() if not table.module.startswith("EmbeddingBag")]
    if not plain:
        return []
    name = w.pick(plain)
    table = w.program.tables[name]
    x = columns.ids(w, table.rows, one_dim=True)
    value = columns.looked_up(w, "module" if table.module else "functional", table, f"self.{name}", x)
    return [value] if value else []


def _collected(w: Writer, found: list[Value], dtype: torch.dtype) -> str:
    """The outputs: cats, stacks and sums of the columns, columns as they are, dense tensors between them."""
    left, outputs = list(found), []
    while left:
        together = [left.pop(0)]
        kind = w.pick(("cat", "cat", "stack", "sum", "alone", "cat last"))
        while left and w.chance(80):
            together.append(left.pop(0))
        if kind in ("cat", "cat last") and w.chance(25):
            dense = w.input(
                dims=("B", w.pick((1, 4))), dtype=dtype, layout=w.pick(LAYOUTS), grad=w.program.grad and w.chance(60)
            )
            together.insert(w.pick(range(len(together) + 1)), dense)
        made = _collector(w, kind, together)
        outputs.extend(made)
        if w.chance(10) and len(together) > 1:
            outputs.append(w.pick(together))
    if w.chance(15) and outputs:
        outputs.append(outputs[0])
    names = [value.name for value in outputs]
    form = w.pick(("list", "tuple", "dict"))
    if form == "dict":
        return "{" + ", ".join(f"'{i}': {name}" for i, name in enumerate(names)) + "}"
    return f"[{', '.join(names)}]" if form == "list" else f"({', '.join(names)},)"


def _collector(w: Writer, kind: str, together: list[Value]) -> list[Value]:
    """One collector over values; those that do not fit it are outputs by themselves."""
    if kind == "alone":
        return together
    if kind == "cat":
        flat = [_flat(w, value) for value in together]
        joined = w.line(f"torch.cat([{_names(flat)}], {w.pick((1, -1))})")
        return [_reshaped(w, joined)] if joined else flat
    same = [value for value in together if value.sample.shape == together[0].sample.shape]
    others = [value for value in together if all(value is not s for s in same)]
    dim = w.pick((1, -1))
    if kind == "stack":
        joined = w.line(f"torch.stack([{_names(same)}], {dim})")
    elif kind == "cat last":
        joined = w.line(f"torch.cat([{_names(same)}], {dim})")
    else:
        joined = w.line(w.pick((" + ".join(v.name for v in same), f"sum([{_names(same)}])")))
    return [_reshaped(w, joined) if joined else same[0], *others]


def _flat(w: Writer, value: Value) -> Value:
    if value.sample.dim() < 3:
        return value
    ways = (
        "{x}.flatten(1)",
        "{x}.reshape({x}.shape[0], -1)",
        "{x}.reshape({x}.size(0), -1)",
        "torch.flatten({x}, start_dim=1)",
    )
    return w.line(w.pick(ways).format(x=value.name)) or value


def _reshaped(w: Writer, value: Value) -> Value:
    if w.chance(70):
        return value
    ways = (
        "{x}.flatten(1)",
        "{x}.unsqueeze(1)",
        "{x} * 2",
        "{x}.transpose(0, 1)",
        "{x}.reshape(-1, {x}.shape[-1])",
        "torch.relu({x})",
    )
    return w.line(w.pick(ways).format(x=value.name)) or value


def _names(values: list[Value]) -> str:
    return ", ".join(value.name for value in values)
