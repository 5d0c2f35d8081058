"""What only large batches run is verified at the sizes of a small one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt.kernels.by_rows.many import are_many, at_a_time, looking
from fxopt.kernels.by_rows.op import some_rows_at_a_time, up_to
from fxopt.verify import Verdict
from tests.test_verify import FIRST, wrapped


class Center(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.abs())


def in_pieces(function: Callable[..., list[Tensor]]) -> Callable:
    return some_rows_at_a_time(function, [(0, 1)], (0,), 256)


def by_another(function: Callable[..., list[Tensor]]) -> Callable:
    return up_to(1024, function, lambda x: [function(x)[0] + (x.shape[0] > 1)], 0, 0)


def judged(model: nn.Module, way: Callable, rows: int) -> Verdict:
    return wrapped(model, (torch.randn(rows, 4),), lambda run, *tensors: way(run)(*tensors), FIRST)


def test_rows_that_mix_are_told_apart_at_few_rows() -> None:
    assert judged(Scale(), in_pieces, 5).ok
    verdict = judged(Center(), in_pieces, 5)
    assert not verdict.ok and verdict.capture_ok and verdict.message.startswith("computed as a large batch is: output")


def test_the_way_of_many_rows_is_looked_at() -> None:
    verdict = judged(Scale(), by_another, 3)
    assert not verdict.ok and verdict.message.startswith("computed as a large batch is: output")


def test_one_row_has_one_way() -> None:
    assert judged(Center(), in_pieces, 1).ok


@pytest.mark.parametrize(("rows", "step"), [(2, 2), (3, 2), (7, 2), (100, 33), (600, 256)])
def test_pieces(rows: int, step: int) -> None:
    with looking(pretended=True) as look:
        assert are_many(rows, 256) and at_a_time(rows, 256) == step
    assert look.asked == (rows <= 256)
    with looking(pretended=False) as look:
        assert are_many(rows, 256) == (rows > 256) and at_a_time(rows, 256) == 256
    assert look.asked == (rows <= 256)
    assert are_many(rows, 256) == (rows > 256) and at_a_time(rows, 256) == 256
