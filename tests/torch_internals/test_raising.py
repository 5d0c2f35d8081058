"""Which answer to a question raises nothing: every way in which Python compiles a check.

PYTEST_DONT_REWRITE: asserts are those that Python makes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fxopt.torch_internals.raising import harmless_answer


class Asked:
    def __init__(self, truth: bool) -> None:
        self.truth = truth
        self.harmless: list[bool | None] = []

    def __bool__(self) -> bool:
        self.harmless.append(harmless_answer(sys._getframe(1)))
        return self.truth


def plain(q: Any) -> None:
    assert q


def negated(q: Any) -> None:
    assert not q, f"a message of {1 + 2} parts and {q!r}"


def raising(q: Any) -> None:
    if q:
        raise ValueError(f"{len('four')} and {sum([1, 2])}")


def raising_else(q: Any) -> int:
    if q:
        return 1
    raise ValueError


def raising_in_else(q: Any) -> int:
    if q:
        x = 1
    else:
        raise ValueError("no")
    return x


def with_message_before(q: Any) -> None:
    if not q:
        message = "prepared" + str(1)
        raise RuntimeError(message)


def in_a_loop(q: Any) -> None:
    for _ in range(2):
        if q:
            raise ValueError


def caught(q: Any) -> int:
    try:
        if q:
            raise ValueError
    except ValueError:
        return 3
    return 4


def behind_another(q: Any, size: int = 3) -> None:
    if size > 2 and q:
        raise ValueError


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (plain, True),
        (negated, False),
        (raising, False),
        (raising_else, True),
        (raising_in_else, True),
        (with_message_before, True),
        (in_a_loop, False),
        (caught, False),
        (behind_another, False),
    ],
)
@pytest.mark.parametrize("truth", [True, False])
def test_checks(check: Callable[[Any], Any], answer: bool, truth: bool) -> None:
    q = Asked(truth)
    try:
        check(q)
    except (AssertionError, ValueError, RuntimeError):
        assert truth is not answer
    assert set(q.harmless) == {answer}


def test_several_in_one() -> None:
    a, b = Asked(False), Asked(False)
    if a or b:
        raise ValueError
    assert a.harmless == b.harmless == [False]
    a, b = Asked(True), Asked(True)
    assert a and b
    assert a.harmless == b.harmless == [True]


def returns(q: Any) -> int:
    if q:
        return 1
    return 2


def chooses(q: Any) -> int:
    return 1 if q else 2


def raises_either_way(q: Any) -> None:
    if q:
        raise ValueError
    raise RuntimeError


def asks_again(q: Any) -> None:
    if q and Asked(True):
        return
    if Asked(False):
        raise ValueError


def converts(q: Any) -> bool:
    return not q


@pytest.mark.parametrize("code", [returns, chooses, raises_either_way, asks_again, converts])
@pytest.mark.parametrize("truth", [True, False])
def test_other_questions(code: Callable[[Any], Any], truth: bool) -> None:
    q = Asked(truth)
    with contextlib.suppress(ValueError, RuntimeError):
        code(q)
    assert q.harmless == [None]
