"""The sizes that a caller chooses, and others in their place that cannot be taken for each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxopt.capture import Capture
from fxopt.capture.guards import Guards
from fxopt.capture.inputs import Dim
from fxopt.shape.sizes import static

_PRIMES = [n for n in range(5, 200) if all(n % d for d in range(2, int(n**0.5) + 1))]
_MOST = 2048  # rows that are made up
_PATIENCE = 50_000  # questions asked of the guards


@dataclass(frozen=True)
class Size:
    """A size that is one for all of `dims`. own: that of the call; like: the number of segments that share it out."""

    name: str
    dims: tuple[Dim, ...]
    own: int
    like: str = ""


def sizes_of(captured: Capture, inputs: Sequence[Tensor]) -> list[Size]:
    """The sizes that a caller may choose independently, as far as the guards know; the smallest first."""
    settled = {dim for dim, _ in captured.guards.static}
    named: dict[str, list[Dim]] = {}
    of: dict[Dim, str] = {}
    for number, spec in enumerate(captured.inputs):
        for axis, name in enumerate(spec.dims):
            if isinstance(name, str) and (number, axis) not in settled:
                named.setdefault(name, []).append((number, axis))
                of[number, axis] = name
    for group in captured.guards.equal:
        names = dict.fromkeys(of[dim] for dim in group if dim in of)
        first, *others = names or [""]
        for other in others:
            named[first] += named.pop(other)
            of.update(dict.fromkeys(named[first], first))
    found = [Size(name, tuple(dims), inputs[dims[0][0]].shape[dims[0][1]]) for name, dims in named.items()]
    return sorted(found, key=lambda size: size.own)


def constants_of(captured: Capture) -> set[int]:
    """Sizes that the graph has beside those a caller chooses: of layers, fields and heads."""
    values = (node.meta.get("val") for node in captured.graph.graph.nodes if "state" not in node.meta)
    sizes = {static(size) for value in values if isinstance(value, Tensor) for size in value.shape}
    return {size for size in sizes if size is not None}


def ambiguous(sizes: Sequence[Size], constants: set[int]) -> list[Size]:
    """Those that are 0 or 1, equal to another, or to one of the graph's own."""
    owns = [size.own for size in sizes]
    return [size for size in sizes if size.own < 2 or owns.count(size.own) > 1 or size.own in constants]


def merged(sizes: Sequence[Size]) -> list[Size]:
    """Those that coincide in the call as one: eager may ask for that without a guard."""
    groups: dict[int, list[Size]] = {}
    for size in sizes:
        groups.setdefault(size.own, []).append(size)
    return [replace(first, dims=sum((s.dims for s in (first, *rest)), ())) for first, *rest in groups.values()]


def chosen(
    guards: Guards, sizes: Sequence[Size], fixed: Mapping[str, int], constants: set[int]
) -> dict[str, int] | None:
    """Small sizes by name, each another one, none 0 or 1 and none of the graph's own, for which the guards hold.

    fixed: sizes that stay what they are, by name. None: there are none, or they were not found.
    """
    name_of = {dim: size.name for size in sizes for dim in size.dims}
    relations = _relations(guards, name_of)
    static = {symbol: size for symbol, dim in guards.sources for pinned, size in guards.static if pinned == dim}
    found, left = dict(fixed), _PATIENCE

    def settle(rest: Sequence[Size]) -> bool:
        nonlocal left
        if not rest:
            return True
        size, *others = rest
        for value in [fixed[size.name]] if size.name in fixed else _candidates(size, sizes, found, constants):
            left -= 1
            if left < 0:
                return False
            found[size.name] = value
            asked = [holds for needs, holds in relations if size.name in needs and needs <= found.keys()]
            if all(holds(found | static) for holds in asked) and settle(others):
                return True
            if size.name not in fixed:
                del found[size.name]
        return False

    return found if settle(sorted(sizes, key=lambda size: bool(size.like))) else None


def _candidates(size: Size, sizes: Sequence[Size], found: Mapping[str, int], constants: set[int]) -> Iterator[int]:
    """Primes, then any number; ids about as many a segment as in the call."""
    taken, least = {*found.values(), *constants}, 2
    if size.like in found:
        segments = next(other.own for other in sizes if other.name == size.like)
        least = max(7, found[size.like] * size.own // max(1, segments))
    numbers = [*(p for p in _PRIMES if p >= least), *range(least, least + _MOST), *range(2, least)]
    yield from (number for number in dict.fromkeys(numbers) if number not in taken)


def _relations(
    guards: Guards, name_of: Mapping[Dim, str]
) -> list[tuple[frozenset[str], Callable[[Mapping[str, int]], bool]]]:
    """The sizes that each relation speaks of, and whether it holds for given ones."""
    source = dict(guards.sources)
    found = []
    for text in guards.relations:
        symbols = {word for word in re.findall(r"[A-Za-z_]\w*", text) if word in source}
        if "t[" not in text:
            names = {symbol: name_of.get(source[symbol], symbol) for symbol in symbols}
            needs = frozenset(name for symbol, name in names.items() if source[symbol] in name_of)
            found.append((needs, _predicate(text, names)))
    return found


def _predicate(text: str, names: Mapping[str, str]) -> Callable[[Mapping[str, int]], bool]:
    code, modules = compile(text, "<guard>", "eval"), {"math": math, "torch": torch}

    def holds(sizes: Mapping[str, int]) -> bool:
        try:
            return bool(eval(code, modules, {symbol: sizes[name] for symbol, name in names.items()}))
        except (ArithmeticError, ValueError):
            return False

    return holds
