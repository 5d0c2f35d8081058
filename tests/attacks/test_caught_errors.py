"""Errors that a forward catches: what a trace raises, or does not raise, is no answer for other sizes and data."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize

CONFIGS = {"default": Config(), "unchecked": Config(verify="off", tune="off")}
Program = Callable[[Any, Tensor, Tensor], Tensor]


def attempt(program: Program) -> Program:
    """`program`, or something else where it raises."""

    def attempted(model: Any, h: Tensor, w: Tensor) -> Tensor:
        try:
            return program(model, h, w)
        except RuntimeError:
            return h.sum(-1, keepdim=True) + w.sum()

    return attempted


def suppressed(model: Any, h: Tensor, w: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        h = h + w
    return h * 2


def worded(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        return h @ w
    except RuntimeError as error:
        return h * len(str(error))


def returns_at_last(model: Any, h: Tensor, w: Tensor) -> Tensor:
    out = h * 2
    try:
        out = h @ w
    finally:
        return out  # noqa: B012


def by_data(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        if w.sum() > 0:
            return h * 2
    except Exception:
        pass
    return h


def by_a_number(model: Any, h: Tensor, w: Tensor) -> Tensor:
    count = (w.sum() > 0).long().sum().item()
    try:
        return h * 2 if count > 0 else h
    except Exception:
        return h * 3


def by_a_count(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        return h * sum(range(int((w > 0).sum())))
    except Exception:
        return h


def full(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        model.queue.put_nowait(1)
    except Exception:
        return h * 2
    return h * 3


def printing(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        print(end="")
    except Exception:
        return h * 2
    return h * 3


def cut(model: Any, h: Tensor, w: Tensor) -> Tensor:
    try:
        return h[:, 1:3] * 2
    except Exception:
        return h * 3


PROGRAMS: dict[str, Program] = {
    "matmul": attempt(lambda model, h, w: h @ w),
    "linear": attempt(lambda model, h, w: F.linear(h, w.t())),
    "add": attempt(lambda model, h, w: h + w[:, :1].t()),
    "add_": attempt(lambda model, h, w: (h * 1).add_(w[:1, :4])),
    "einsum": attempt(lambda model, h, w: torch.einsum("bd,de->be", h, w)),
    "reshape": attempt(lambda model, h, w: h.reshape(w.shape[0], -1)),
    "view": attempt(lambda model, h, w: h.view(w.shape[1], -1)),
    "cat": attempt(lambda model, h, w: torch.cat([h, w], 1)),
    "index": attempt(lambda model, h, w: h[:, torch.arange(w.shape[0])]),
    "split": attempt(lambda model, h, w: h.split([1, w.shape[0] - 1], 1)[1]),
    "layer": attempt(lambda model, h, w: model.layer(w) + h.sum()),
    **{program.__name__: program for program in (suppressed, worded, returns_at_last, by_data, by_a_number)},
    **{program.__name__: program for program in (by_a_count, full, printing, cut)},
}


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.table, self.layer, self.queue = nn.Embedding(9, 4), nn.Linear(4, 4), queue.Queue(maxsize=20)
        self.program = program

    def forward(self, ids: Tensor, w: Tensor) -> Tensor:
        return self.program(self, self.table(ids), w)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer = inner, nn.Linear(3, 4)

    def forward(self, ids: Tensor, w: Tensor) -> Tensor:
        return self.inner(ids, w).relu() + self.layer(w.new_ones(1, 3)).sum()


def answers(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    found = []
    with torch.no_grad():
        for rows, width in ((2, 3), (3, 3), (4, 6), (1, 4), (4, 4), (1, 1), (3, 6)):
            for sign in (1, -1):
                ids, w = torch.randint(0, 9, (3,)), torch.rand(rows, width) * sign
                with contextlib.suppress(RuntimeError):
                    found.append(model(ids, w))
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_caught(program: Program, around: bool, config: Config) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return Around(Model(program)) if around else Model(program)

    expected, found = answers(make()), answers(optimize(make(), config=config))
    assert len(found) == len(expected)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)
