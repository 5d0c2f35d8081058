"""Value ranges, rule by rule: what is claimed of the last value of a small program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.shape.known import Program, known

INT64 = "[-9223372036854775808, 9223372036854775807]"
INT32 = "[-2147483648, 2147483647]"
FLOAT = "[-inf, inf] or NaN"
MOST = 2**63 - 1


def table(*rows: tuple[str, Program]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("expected", "program"), rows)


def check(expected: str, program: Program) -> None:
    assert str(known(program).values) == expected


@table(
    ("[0, 100]", lambda t: torch.bucketize(t.x, torch.arange(100.0))),
    ("[0, 100]", lambda t: torch.bucketize(t.x, torch.arange(100.0), right=True, out_int32=True)),
    ("[0, 7]", lambda t: torch.searchsorted(torch.arange(14.0).reshape(2, 7), t.x[:2].contiguous())),
    ("[0, 2]", lambda t: t.x.argmax(1)),
    ("[0, 2]", lambda t: t.x.argsort(1)),
    ("[0, 2]", lambda t: t.x.topk(2, 1).indices),
    ("[0, 2]", lambda t: t.x.max(1).indices),
    ("[0, 2]", lambda t: t.x.sort(1).indices),
    ("[0, 9]", lambda t: torch.arange(10)),
    ("[3, 9]", lambda t: torch.arange(3, 10, 2)),
    ("[-4, 5]", lambda t: torch.arange(5, -5, -1)),
    (FLOAT, lambda t: torch.arange(0.0, 1.0, 0.1)),
    ("[0, 100]", lambda t: t.b.median()),
    (INT64, lambda t: t.b[:0].median()),
    (INT64, lambda t: t.b[t.m].median()),
    ("[0, 1]", lambda t: F.one_hot(t.i % 7, 7)),
    ("[0, 1]", lambda t: t.m.long()),
    ("[0, 1]", lambda t: t.m + 0),
    ("[0, 4]", lambda t: torch.nonzero(t.m)),
    ("[0, 99]", lambda t: torch.unique(t.i % 100, return_inverse=True)[0]),
    ("[0, 14]", lambda t: torch.unique(t.i, return_inverse=True)[1]),
    ("[0, 6]", lambda t: torch.randint(7, (3,))),
    ("[0, 3]", lambda t: t.m.sum(1)),
    ("[0, 3]", lambda t: t.m.cumsum(1) * t.m),
    ("[-60, 0]", lambda t: -(t.i % 21).sum(1)),
    (INT64, lambda t: t.i.sum(1)),
    ("{1} or {3} or {9}", lambda t: torch.tensor([1, 9, 3])[t.i % 3]),
)
def test_sources(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    (f"[0, {MOST - 1}]", lambda t: t.x.argmax(0)),
    (f"[0, {MOST - 1}]", lambda t: torch.arange(t.x.shape[0])),
    (f"[0, {MOST - 1}]", lambda t: torch.nonzero(t.m)),
    (f"[0, {MOST}]", lambda t: t.m.sum(0)),
    (INT64, lambda t: (t.i % 21).sum(0)),
    ("[0, 20]", lambda t: (t.i % 21).amax(0)),
    (f"[0, {MOST - 1}]", lambda t: torch.unique(t.i, return_inverse=True)[1]),
)
def test_symbolic_sizes(expected: str, program: Program) -> None:
    assert str(known(program, static=False).values) == expected


@table(
    ("[0, 999]", lambda t: t.i % 1000),
    ("[0, 999]", lambda t: t.i.remainder(torch.tensor(1000))),
    ("[-999, 0]", lambda t: t.i % -1000),
    ("[-9, 9]", lambda t: t.i.remainder(torch.tensor([-10, 10, 3]))),
    (INT64, lambda t: t.i.remainder(torch.tensor([10, 0, 3]))),
    (INT64, lambda t: t.i.remainder(t.k.long())),
    ("[0, 7]", lambda t: t.i.remainder(t.k.long().clamp(1, 8))),
    ("[0, 100]", lambda t: t.b % 101),
    ("[0, 99]", lambda t: t.b % 100),
    ("[-9, 9]", lambda t: t.i.fmod(10)),
    ("[0, 9]", lambda t: t.b.fmod(10)),
    ("[0, 33]", lambda t: t.b // 3),
    ("[-34, 0]", lambda t: t.b // -3),
    ("[-33, 0]", lambda t: torch.div(t.b, -3, rounding_mode="trunc")),
    (INT64, lambda t: t.i // t.i),
    ("[-1844674407370955162, 1844674407370955161]", lambda t: t.i // 5),
    (INT64, lambda t: t.i // -1),
    ("[0, 50]", lambda t: t.b / 2),
    ("[0, 5] or NaN", lambda t: t.x.clamp(0, 5)),
    ("[0, 5]", lambda t: t.b.float() % 5.0),
    (FLOAT, lambda t: t.x % 5.0),
)
def test_division(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    ("[1, 101]", lambda t: t.b + 1),
    ("[-100, 0]", lambda t: -t.b),
    ("[-99, 1]", lambda t: 1 - t.b),
    ("[0, 300]", lambda t: t.b * 3),
    ("[0, 10000]", lambda t: t.b * t.b),
    (INT64, lambda t: t.i + 1),
    (INT32, lambda t: t.b.int() * 2654435 * 2654435),
    ("[0, 265443500]", lambda t: t.b.int() * 2654435),
    (INT32, lambda t: (t.i % 2**31).int() * 2),
    (INT64, lambda t: t.b.add(t.b, alpha=3)),
    ("[-128, 127]", lambda t: t.s.abs()),
    ("[0, 127]", lambda t: t.s.clamp(min=-127).abs()),
    ("[0, 50]", lambda t: (t.b - 50).abs()),
    ("[-1, 1]", lambda t: t.i.sign()),
    ("[0, 1]", lambda t: t.b.sign()),
    ("[0, 255]", lambda t: -t.u),
    ("[0, 255]", lambda t: t.i & 255),
    ("[0, 100]", lambda t: t.b & t.i),
    ("[0, 127]", lambda t: t.b ^ 3),
    ("[3, 127]", lambda t: t.b | 3),
    ("[0, 50]", lambda t: t.b >> 1),
    ("[0, 400]", lambda t: t.b << 2),
    (INT64, lambda t: t.b << t.i),
    ("[-101, -1]", lambda t: ~t.b),
    ("[0, 2500]", lambda t: (t.b - 50).square()),
)
def test_arithmetic(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    ("[0, 99]", lambda t: t.i.clamp(0, 99)),
    ("[0, 99]", lambda t: t.b.clamp(max=99)),
    ("{5}", lambda t: t.i.clamp(9, 5)),
    (f"[3, {MOST}]", lambda t: t.i.clamp(min=3)),
    ("[1, 8]", lambda t: t.i.clamp(t.k.long().clamp(1, 8), torch.tensor(8))),
    ("[0, 50] or NaN", lambda t: t.x.clamp(0, 50)),
    ("[0, 9]", lambda t: torch.minimum(t.b, torch.tensor(9))),
    ("[9, 100]", lambda t: torch.maximum(t.b, torch.tensor([9, 80, 80]))),
    (f"[0, {MOST}]", lambda t: t.i.relu()),
    ("[0, inf] or NaN", lambda t: t.x.relu()),
    ("[0, 6]", lambda t: F.relu6(t.b.float())),
    ("[0, 9]", lambda t: t.x.nan_to_num(0.0).clamp(0, 9)),
    ("[-3.40282347e+38, 3.40282347e+38]", lambda t: t.x.nan_to_num()),
)
def test_bounds(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    (f"[0, {MOST}]", lambda t: torch.where(t.i < 0, 0, t.i)),
    (f"[0, {MOST}]", lambda t: torch.where(t.i >= 0, t.i, 0)),
    (f"[0, {MOST}]", lambda t: torch.where(torch.gt(torch.tensor(0), t.i), 0, t.i)),
    (f"[0, {MOST}]", lambda t: torch.where(~(t.i >= 0), 0, t.i)),
    (f"[0, {MOST}]", lambda t: t.i.masked_fill(t.i < 0, 0)),
    ("[0, 99]", lambda t: torch.where((t.i < 0) | (t.i >= 100), 0, t.i)),
    ("[0, 99]", lambda t: torch.where((t.i >= 0) & (t.i < 100), t.i, 0)),
    ("[0, 99]", lambda t: torch.where(torch.logical_and(t.i >= 0, torch.gt(torch.tensor(100), t.i)), t.i, 0)),
    (INT64, lambda t: torch.where((t.i < 0) & (t.i >= 100), 0, t.i)),
    (INT64, lambda t: torch.where(t.k < 0, 0, t.i)),
    (INT64, lambda t: torch.where(t.i < 0, t.i, 0) * -1),
    ("[0, 6] or [8, 100]", lambda t: torch.where(t.b == 7, 0, t.b)),
    ("[0, 6] or [8, 100]", lambda t: torch.where(t.b != 7, t.b, 0)),
    ("{7}", lambda t: torch.where(t.b != 7, 7, t.b)),
    ("{-1} or [1, 100]", lambda t: torch.where(t.b == 0, -1, t.b)),
    ("[0, 99]", lambda t: torch.where((t.i.view(-1) < 0).view(-1), 0, t.i.view(-1)).clamp(max=99)),
    ("[0, 99]", lambda t: torch.where((t.i < 0).unsqueeze(1), 0, t.i.unsqueeze(1)).clamp(max=99)),
    (INT64, lambda t: torch.where((t.i[:3] < 0).t(), 0, t.i[:3])),
    ("[0, 9]", lambda t: torch.where(t.x < 0, 0, t.x.clamp(max=9).nan_to_num(0).long())),
    ("[0, 9]", lambda t: torch.where(t.x > 0, t.x.clamp(max=9).long(), 0)),
    ("[0, 4]", lambda t: torch.where(t.b < 5, t.b, 0)),
    ("[0, 5]", lambda t: torch.where(t.b < 5.5, t.b, 0)),
    ("[0, 5]", lambda t: torch.where(t.b.to(torch.int32) < 6, t.b.to(torch.int32), 0)),
    ("[-inf, inf]", lambda t: torch.where(t.x.isnan(), 0.0, t.x)),
    ("[-inf, inf]", lambda t: torch.where(t.x == t.x, t.x, 0.0)),
    ("[0, inf]", lambda t: torch.where(t.x > 0, t.x, 0.0)),
    ("[0, inf] or NaN", lambda t: torch.where(t.x <= 0, 0.0, t.x)),
    ("[0, 100]", lambda t: torch.where(t.b < 0, -1, t.b)),
    ("[-1, 99]", lambda t: torch.where(t.b > 99, -1, t.b)),
    ("[0, 3]", lambda t: torch.where(t.b < t.i % 5, t.b, 0)),
)
def test_substitutions(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    ("[0, 100]", lambda t: t.b.reshape(-1, 1).squeeze(1)[1:]),
    ("[0, 100]", lambda t: torch.cat([t.b, t.b % 7], 1)),
    ("[-1, 100]", lambda t: F.pad(t.b, [1, 1], value=-1)),
    ("[0, 100]", lambda t: torch.stack([t.b, t.b % 7]).permute(2, 1, 0).flip(0)),
    ("[0, 100]", lambda t: t.b.gather(1, t.i % 3)),
    ("[0, 100]", lambda t: t.b.split(1, 1)[1]),
    ("[0, 100]", lambda t: t.b.unbind(1)[2]),
    ("[0, 100]", lambda t: t.b.topk(2, 1).values.amax(1)),
    ("[0, 100]", lambda t: t.b[t.m]),
    ("[0, 100]", lambda t: torch.tril(t.b)),
    ("{0}", lambda t: torch.zeros_like(t.b)),
    ("{3}", lambda t: torch.full((4,), 3)),
    ("{1}", lambda t: t.i.new_ones(2)),
    ("[0, 100]", lambda t: t.b.expand(2, -1, -1)),
)
def test_data_movement(expected: str, program: Program) -> None:
    check(expected, program)


@table(
    ("[0, 100]", lambda t: t.b.int().to(torch.int8).float().long()),
    ("[0, 255]", lambda t: (t.b * 3).to(torch.uint8)),
    (INT32, lambda t: t.i.int()),
    ("[0, 999]", lambda t: (t.i % 1000).int()),
    (INT64, lambda t: t.x.long()),
    (INT64, lambda t: t.x.clamp(0, 9).long()),
    ("[0, 9]", lambda t: t.x.nan_to_num().clamp(0, 9).long()),
    ("[-9, 9]", lambda t: t.x.nan_to_num().clamp(-9.9, 9.9).long()),
    ("[0, 16777220]", lambda t: t.i.clamp(0, 16777219).float()),
    ("[0, 1]", lambda t: t.x.bool().int()),
    ("{1}", lambda t: (t.b + 1).bool()),
    ("[0, 1]", lambda t: t.x.sigmoid().nan_to_num()),
    ("[0, 9]", lambda t: (t.x.sigmoid().nan_to_num() * 9).long()),
    ("[0, 9]", lambda t: (t.x.sigmoid().nan_to_num() * 9).floor()),
    (INT32, lambda t: t.x.nan_to_num().clamp(0, 100).view(torch.int32)),  # the bits of floats
    (INT32, lambda t: torch.where(t.i.half() >= 2048.5, t.i, 2048).int()),  # 2047 rounds to 2048, as 2048.5 does
)
def test_conversions(expected: str, program: Program) -> None:
    check(expected, program)
