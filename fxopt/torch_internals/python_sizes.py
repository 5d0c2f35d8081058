"""What Python asks of a size as of any number: its text, its type, a copy. While a trace runs, a symbolic size answers
the user's code as the number that it stands for; torch's own code sees the symbol.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.torch_internals.patches import Change

_NUMBERS: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_SYMBOLS = tuple(_NUMBERS)
_ABSENT = object()
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_KNOW_SYMBOLS = frozenset({"torch", "sympy", "mpmath", "functorch", "fxopt"})
_MESSAGES = frozenset({"_assert", "debug", "info", "warning"})  # what they are given is read by nobody else
_ENDS = ("POP_TOP", "STORE_", "RETURN_", "POP_JUMP", "YIELD_", "RAISE_")


def as_numbers(spaces: Iterable[dict[str, Any]]) -> Iterator[Change]:
    """The text of a size is that of its number, and a comparison of sizes is True or False: both become guards.
    isinstance() takes a size for a number. A deep copy of it is itself, so that its questions are guards, too.

    Args:
        spaces: the globals of the user's functions that ask isinstance(). Asked in there, it costs nothing elsewhere:
            a trace in torch asks it often enough to take 5 to 9% longer by one more call.
    """
    here = threading.get_ident()
    for kind, number in _NUMBERS.items():
        yield kind, "__repr__", _text(vars(kind)["__repr__"], number, here)
        yield kind, "__format__", _formatted(number, here)
        yield kind, "__reduce_ex__", _itself(here)
    yield torch.SymBool, "__eq__", _equal(vars(torch.SymBool)["__eq__"], here)
    for kind in (torch.SymInt, torch.SymFloat):
        for name in _COMPARISONS:
            yield kind, name, _decided(vars(kind)[name], here)
        for name in ("__mod__", "__rmod__"):
            yield kind, name, _remainder(vars(kind)[name], name, here)

    def is_instance(value: Any, kinds: Any, /) -> bool:
        number = _NUMBERS.get(type(value))
        if number is None or threading.get_ident() != here or _names_symbols(kinds):
            return isinstance(value, kinds)
        return isinstance(number(), kinds)

    yield from ((Globals(space), "isinstance", is_instance) for space in spaces if "isinstance" not in space)


class Globals:
    """The globals of a function as attributes, of which one may be absent."""

    def __init__(self, space: dict[str, Any]) -> None:
        vars(self)["_space"] = space

    def __getattr__(self, name: str) -> Any:
        return self._space.get(name, _ABSENT)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is _ABSENT:
            self._space.pop(name, None)
        else:
            self._space[name] = value


def asked_by_user(through: Container[str] = ()) -> bool:
    """Whether it is the user's code that has called our caller, perhaps through Python's own or these modules, and not
    only for what torch._assert is given.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ((name := _name(frame)) in through or _top(name) in sys.stdlib_module_names):
        frame = frame.f_back
    if frame is None or _top(_name(frame)) in _KNOW_SYMBOLS:
        return False
    return not _is_message(frame.f_code, frame.f_lasti)


def caller(through: Container[str]) -> FrameType:
    """The frame that has called our caller through these modules."""
    frame: Any = sys._getframe(2)
    while _name(frame) in through:
        frame = frame.f_back
    return frame


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _names_symbols(kinds: Any) -> bool:
    return any(map(_names_symbols, kinds)) if type(kinds) is tuple else kinds in _SYMBOLS


def _text(original: Callable[[Any], str], number: type, here: int) -> Callable[[Any], str]:
    def text(self: Any) -> str:
        return repr(number(self)) if threading.get_ident() == here and asked_by_user() else original(self)

    return text


def _formatted(number: type, here: int) -> Callable[[Any, str], str]:
    def formatted(self: Any, spec: str) -> str:
        value = number(self) if threading.get_ident() == here and asked_by_user() else repr(self)
        return format(value, spec)

    return formatted


def _decided(compare: Callable[[Any, Any], Any], here: int) -> Callable[[Any, Any], Any]:
    def decided(self: Any, other: Any) -> Any:
        answer = compare(self, int(other) if type(other) is bool else other)  # of algebra's truth no number is equal
        if type(answer) is not torch.SymBool or threading.get_ident() != here or not asked_by_user():
            return answer
        if free_unbacked_symbols(answer) and not compares_truth(sys._getframe(1)):  # data decide: perhaps nobody asks
            return answer
        return bool(answer)

    return decided


def _equal(compare: Callable[[Any, Any], Any], here: int) -> Callable[[Any, Any], Any]:
    """Of a truth that data decide and a number, which torch takes for another value."""

    def equal(self: Any, other: Any) -> Any:
        if threading.get_ident() != here or not asked_by_user():
            return compare(self, other)
        return bool(self) == (bool(other) if type(other) is torch.SymBool else other)

    return equal


def compares_truth(frame: FrameType) -> bool:
    """Whether its code asks `is True` or the like, which is never said of a symbol."""
    return _compares_truth(frame.f_code)


@functools.lru_cache(1024)
def _compares_truth(code: CodeType) -> bool:
    steps = itertools.pairwise(dis.get_instructions(code))
    return any(two.opname == "IS_OP" and (one.opname, one.argval) != ("LOAD_CONST", None) for one, two in steps)


def _remainder(of_terms: Callable[[Any, Any], Any], name: str, here: int) -> Callable[[Any, Any], Any]:
    """Of whole numbers a term. torch takes others for whole ones: math.sqrt(L) % 1 would be 0 for all sizes."""

    def remainder(self: Any, other: Any) -> Any:
        if threading.get_ident() != here or all(isinstance(each, (int, torch.SymInt)) for each in (self, other)):
            return of_terms(self, other)
        return getattr(float(self), name)(float(other))

    return remainder


def _itself(here: int) -> Callable[[Any, int], Any]:
    def reduced(self: Any, protocol: int) -> Any:
        return "itself" if threading.get_ident() == here else object.__reduce_ex__(self, protocol)

    return reduced


@functools.lru_cache(1024)
def _is_message(code: CodeType, at: int) -> bool:
    """Whether what is computed at this instruction goes into a statement as torch._assert(x.dim() == 2, f"{x.shape}")
    and into nothing else."""
    steps = list(dis.get_instructions(code))
    place = next((number for number, step in enumerate(steps) if step.offset == at), None)
    if place is None:
        return False
    ends = [number for number, step in enumerate(steps) if step.opname.startswith(_ENDS)]
    before = max((end for end in ends if end < place), default=-1)
    after = min((end for end in ends if end > place), default=len(steps) - 1)
    dropped = steps[after].opname == "POP_TOP" and steps[after - 1].opname.startswith("CALL")
    return dropped and not _MESSAGES.isdisjoint(str(step.argval) for step in steps[before + 1 : place])
