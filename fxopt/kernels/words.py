"""Plans as int64 words: what kind it is, then its fields in their order; words.h reads them one after the other.

As an operator's argument words are a text, which costs a call nothing however many they are: torch takes 0.13 us for
each number of a list.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


def bits_of(value: float) -> int:
    """The bits of a double."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def float_of(bits: int) -> float:
    """The inverse of :func:`bits_of`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def text_of(words: Sequence[int]) -> str:
    """Words as shims.h reads them."""
    return ",".join(map(str, words))


def words_in(text: str) -> list[int]:
    """The inverse of :func:`text_of`.

    Raises:
        ValueError: the text is none of those.
    """
    return [int(word) for word in text.split(",")]


@functools.lru_cache(maxsize=4096)
def tensor_of(text: str) -> torch.Tensor:
    """The words of a text, for the way past the dispatcher: int64, 1-D."""
    return torch.tensor(words_in(text), dtype=torch.int64, device="cpu")


class Worded:
    """A dataclass that can be written as words: of ints, bools, floats, literals, such dataclasses, one of several such
    dataclasses, tuples, and None beside them.

    A float is its bits, and a literal its place among those that there may be. In front of a tuple of any length stands
    its length, in front of one of several dataclasses its place among them, and in front of what may be None whether it
    is there.
    """

    KIND: ClassVar[int]  # the first word, which the kernel checks: a number of this plan and of its version
    OPERATOR: ClassVar[str]

    def words(self) -> list[int]:
        words = [self.KIND]
        _write(words, type(self), self)
        return words

    @classmethod
    def of(cls, words: Sequence[int]) -> Self:
        """The inverse of :meth:`words`.

        Raises:
            ValueError: another operator's words, another version's, or not all of them.
        """
        left = iter(words)
        try:
            found = _read(left, cls) if next(left) == cls.KIND else None
        except (StopIteration, IndexError):
            found = None
        if found is None or next(left, None) is not None:
            raise ValueError(f"fxopt.{cls.OPERATOR}: expected a plan made by words()")
        return found


@functools.cache
def _fields(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _write(words: list[int], kind: Any, value: Any) -> None:
    if kind in (int, bool, float):
        words.append(bits_of(value) if kind is float else int(value))
    elif dataclasses.is_dataclass(kind):
        for name, inner in _fields(kind):  # type: ignore[arg-type]
            _write(words, inner, getattr(value, name))
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is ...:
            words.append(len(value))
            kinds = kinds[:1] * len(value)
        for inner, item in zip(kinds, value, strict=True):
            _write(words, inner, item)
    elif get_origin(kind) is Literal:
        words.append(get_args(kind).index(value))
    elif NoneType in get_args(kind):
        words.append(value is not None)
        if value is not None:
            _write(words, get_args(kind)[0], value)
    else:
        words.append(get_args(kind).index(type(value)))
        _write(words, type(value), value)


def _read(words: Iterator[int], kind: Any) -> Any:
    if kind in (int, bool, float):
        word = next(words)
        return float_of(word) if kind is float else kind(word)
    if dataclasses.is_dataclass(kind):
        return kind(*[_read(words, inner) for _, inner in _fields(kind)])  # type: ignore[arg-type, operator]
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        return kinds[next(words)]
    if get_origin(kind) is not tuple:
        at = next(words)
        return _read(words, kinds[at]) if NoneType not in kinds else _read(words, kinds[0]) if at else None
    if kinds[-1] is ...:
        return tuple([_read(words, kinds[0]) for _ in range(next(words))])
    return tuple([_read(words, inner) for inner in kinds])
