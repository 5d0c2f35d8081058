"""A tensor that is edited behind a copy of it: no rewrite reads it in place of the copy.

Each example of the catalogue computes on with the copy of one of its tensors, whose original is halved and returned.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxopt
from fxopt import Config
from tests.rewrites.test_catalogue import CATALOGUE

CONFIG = Config(verify="off", tune="off")  # which would undo what is wrong


class _Copying(TorchFunctionMode):
    """The `turn`-th float result is halved, and a copy from before that takes its place."""

    def __init__(self, turn: int) -> None:
        self.turn, self.halved = turn, list[Tensor]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or isinstance(result, nn.Parameter) or not result.is_floating_point():
            return result
        self.turn -= 1
        if self.turn != -1:
            return result
        before = result.clone()
        self.halved.append(result.mul_(0.5))
        return before


class Copied(nn.Module):
    def __init__(self, inner: nn.Module, turn: int) -> None:
        super().__init__()
        self.inner, self.turn = inner, turn

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        with _Copying(self.turn) as mode:
            return self.inner(x), mode.halved


@pytest.mark.parametrize("turn", [0, 2, 4])
@pytest.mark.parametrize("name", CATALOGUE)
def test_what_is_edited_behind_its_copy_is_not_read(name: str, turn: int) -> None:
    model = Copied(CATALOGUE[name].fires(), turn).eval()
    x, twin = torch.randn(6, 3), copy.deepcopy(model)  # what is halved may be a weight
    with torch.no_grad():
        try:
            expected, halved = model(x.clone())
        except RuntimeError as error:
            pytest.skip(f"eager: {error}")
        if not halved:
            pytest.skip("it makes fewer tensors")
        fast = fxopt.optimize(twin, config=CONFIG)
        torch.testing.assert_close(fast(x.clone()), (expected, halved), rtol=1e-4, atol=1e-5)
        (findings,) = fast._fxopt.findings
        assert not findings.eager_reason
