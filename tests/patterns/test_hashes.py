"""Hashes of ids as models write them: part of the lookup, and eager's ids to the bit, also at the ends of a dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.found import Spelling, assert_eager, executable, findings, plans


def murmur(x: Tensor) -> Tensor:
    x = (x ^ (x >> 16)) * -2048144789
    x = (x ^ (x >> 13)) * -1028477387
    return x ^ (x >> 16)


def splitmix(x: Tensor) -> Tensor:
    x = x + -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return torch.bitwise_xor(x, torch.bitwise_right_shift(x, 31))


def wang(x: Tensor) -> Tensor:
    x = ~x + (x << 21)
    x = (x ^ (x >> 24)) * 265
    x = (x + (x << 3)) + (x << 8)
    return x + (x << 31)


def jenkins(x: Tensor) -> Tensor:
    x = (x + 2127912214) + (x << 12)
    x = (x ^ -949894596) ^ (x >> 19)
    return (x + 374761393) + (x << 5) | 1


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x ^= x >> 15
    x *= 73244475
    x |= 6
    x <<= 1
    return x


def both_sides(x: Tensor) -> Tensor:
    """Either side needs a register, and both begin alike."""
    return ((x << 15) - x) - (x * (x | 5))


def with_where(x: Tensor) -> Tensor:
    y = torch.where(x < 0, 0, x)
    y = torch.where(y == 5, 7, y)
    return y + (y << 2)


def two_of_one(x: Tensor) -> Tensor:
    """The register of the first half is saved before the halves part."""
    return (x ^ (x >> 13)) * (x ^ (x >> 16)) + 3


HASHES = (murmur, splitmix, wang, jenkins, in_place, both_sides, with_where, two_of_one)


def ids_of(dtype: torch.dtype, rows: int = 9) -> Tensor:
    ends = torch.iinfo(dtype)
    drawn = torch.randint(ends.min, ends.max, (rows,), dtype=dtype)
    return torch.cat([drawn, torch.tensor([ends.min, ends.min + 1, -1, 0, 1, ends.max], dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("hashed", HASHES, ids=lambda hashed: hashed.__name__)
def test_a_hash_is_part_of_the_lookup(hashed: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    if dtype is torch.int32 and hashed is splitmix:
        pytest.skip("its constants have 64 bits")
    model = Spelling(lambda m, i: torch.cat([m.e(hashed(i) % 20), m.f(hashed(i) % 7)], 1)).eval()
    made = executable(model, (ids_of(dtype),))
    (plan,) = plans(made)
    assert len(plan.columns) == 2
    assert made.graph is not None
    assert [
        str(n.target) for n in made.graph.graph.nodes if "fxopt" not in str(n.target) and n.op == "call_function"
    ] == ["<built-in function getitem>"]
    for rows in (0, 1, 300):
        assert_eager(made, model, (ids_of(dtype, rows),))


@pytest.mark.parametrize(
    ("hashed", "named"),
    [
        (lambda i, k: i ^ k, "aten.__xor__.Tensor"),
        (lambda i, k: (i >> 64) & 7, "aten.__rshift__.Scalar"),
        (lambda i, k: i * k & 15, "aten.mul.Tensor"),
    ],
)
def test_what_stays_in_front_is_named(hashed: Callable[[Tensor, Tensor], Tensor], named: str) -> None:
    model = Spelling(lambda m, i, k: torch.cat([m.e(hashed(i, k) % 20), m.f(i % 20)], 1)).eval()
    args = (ids_of(torch.int64), ids_of(torch.int64))
    made = executable(model, args)
    assert any(miss.reason.startswith(f"{named} makes ids") for miss in findings(made).misses)
    assert_eager(made, model, args)
