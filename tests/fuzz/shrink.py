"""The smallest program that is still wrong in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.programs import Input, Program, Sizes
from tests.fuzz.writer import SAMPLE, B, L

_SMALL = (Sizes(2, 2, 1.0), Sizes(1, 1, 1.0), Sizes(2, 3), Sizes(3, 2), Sizes(1, 2), Sizes(3, 3), Sizes(4, 4))
_TRIALS = 600


def shrink(program: Program, wrong: Callable[[Program], bool], trials: int = _TRIALS) -> Program:
    """Takes away whatever can go while `wrong(program)` holds."""
    left, smaller = trials, True
    while smaller and left > 0:
        smaller = False
        for candidate in _candidates(program):
            left -= 1
            if left < 0:
                break
            if wrong(candidate):
                program, smaller = candidate, True
                break
    return program


def _candidates(p: Program) -> Iterator[Program]:
    for i in range(len(p.later)):
        yield replace(p, later=p.later[:i] + p.later[i + 1 :])
    if len(p.outputs) > 1:
        for name in p.outputs:
            yield replace(p, outputs=(name,))
        for name in p.outputs:
            yield replace(p, outputs=tuple(other for other in p.outputs if other != name))
    yield from _earlier_outputs(p)
    for i in reversed(range(len(p.lines))):
        yield replace(p, lines=p.lines[:i] + p.lines[i + 1 :])
    yield from _cut(p)
    yield from _bypassed(p)
    for i, given in enumerate(p.inputs):
        if not _read(given.name, p):
            yield replace(p, inputs=p.inputs[:i] + p.inputs[i + 1 :])
    for i, line in enumerate(p.setup):
        if not _read(re.findall(r"self\.(\w+) =|register_buffer\(\"(\w+)", line)[0][0] or "buffer", p):
            yield replace(p, setup=p.setup[:i] + p.setup[i + 1 :])
    plain: tuple[dict[str, Any], ...] = (
        {"dtype": torch.float32},
        {"training": False},
        {"grad": False},
        {"whole": False},
        {"example": True},
        {"verify": "off"},
        {"edited": ""},
        {"nan": False},
    )
    yield from (replace(p, **change) for change in plain if any(getattr(p, k) != v for k, v in change.items()))
    for i, given in enumerate(p.inputs):
        dims = re.search(r"torch\.randn?\(([^()]*)\)", given.made)
        simple = Input(given.name, f"torch.randn({dims[1]})", False) if dims and "fill" not in given.made else given
        for changed in (replace(given, grad=False), simple):
            if changed != given:
                yield replace(p, inputs=(*p.inputs[:i], changed, *p.inputs[i + 1 :]))
    if p.captured not in _SMALL[:2]:
        yield from (replace(p, captured=sizes) for sizes in _SMALL)
    for i, sizes in enumerate(p.later):
        if sizes not in _SMALL:
            yield from (replace(p, later=(*p.later[:i], small, *p.later[i + 1 :])) for small in _SMALL)
    yield from _smaller_numbers(p)


def _read(name: str, p: Program) -> bool:
    return re.search(rf"\b{name}\b", "\n".join((*p.lines, *p.outputs))) is not None


def _target(line: str) -> str | None:
    found = re.match(r"(\w+) = ", line)
    return found[1] if found else None


def _earlier_outputs(p: Program) -> Iterator[Program]:
    """One variable alone, and nothing behind it."""
    for i, line in enumerate(p.lines[:-1]):
        name = _target(line)
        if name is not None:
            yield replace(p, outputs=(name,), lines=p.lines[: i + 1])


def _cut(p: Program) -> Iterator[Program]:
    """A variable becomes an input, and what made it goes."""
    samples = _samples(p)
    for i, line in reversed(list(enumerate(p.lines))):
        name = _target(line)
        value = samples.get(name or "")
        if name is None or not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
            continue
        dims = ", ".join({B: "B", L: "L"}.get(n, str(n)) for n in value.shape)
        if any(n > 64 for n in value.shape):
            continue
        dtype = f".to({p.dtype})" if p.dtype is not torch.float32 else ""
        given = Input(name, f"torch.randn({dims}){dtype}", value.requires_grad and p.grad)
        yield replace(p, lines=p.lines[:i] + p.lines[i + 1 :], inputs=(*p.inputs, given))


def _samples(p: Program) -> dict[str, Any]:
    """Variables by name, for sizes that tell what a dim is."""
    loaded = p.loaded()
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "self": loaded.build()}
    scope["dtype"] = p.dtype
    try:
        with torch.no_grad():
            torch.manual_seed(0)
            scope.update(zip((given.name for given in p.inputs), loaded.inputs(*SAMPLE), strict=True))
            for line in p.lines:
                exec(line, scope)
    except Exception:
        return {}
    return scope


def _bypassed(p: Program) -> Iterator[Program]:
    """A variable is another one of its shape."""
    samples = _samples(p)
    for i, line in enumerate(p.lines):
        name = _target(line)
        value = samples.get(name or "")
        if name is None or not isinstance(value, Tensor):
            continue
        for other in re.findall(r"\b(?:v|x|ids|mask)\d+\b", line.split(" = ", 1)[1]):
            given = samples.get(other)
            if isinstance(given, Tensor) and given.shape == value.shape and given.dtype == value.dtype:
                changed = [re.sub(rf"\b{name}\b", other, later) for later in p.lines[i + 1 :]]
                outputs = tuple(other if out == name else out for out in p.outputs)
                yield replace(p, lines=(*p.lines[:i], *changed), outputs=outputs)


def _smaller_numbers(p: Program) -> Iterator[Program]:
    """Every use of a size becomes another size."""
    number = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
    text = "\n".join((*p.setup, *(given.made for given in p.inputs)))
    for found in sorted({int(n) for n in number.findall(text) if 2 < int(n) < 10_000}, reverse=True):
        for small in (2, 3):
            if small >= found:
                continue

            def changed(line: str, found: int = found, small: int = small) -> str:
                return re.sub(rf"(?<![\w.]){found}(?![\w.])", str(small), line)

            yield replace(
                p,
                setup=tuple(map(changed, p.setup)),
                lines=tuple(map(changed, p.lines)),
                inputs=tuple(replace(given, made=changed(given.made)) for given in p.inputs),
            )
