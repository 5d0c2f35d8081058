"""A size that changes from call to call, and that the forward makes a number of: the report names the line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import capture


class Positions(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.items, self.positions, self.way = nn.Embedding(50, 8), nn.Embedding(20, 8), way

    def forward(self, items: Tensor) -> Tensor:
        users, length = items.shape
        if self.way == "numpy":
            places = torch.from_numpy(np.tile(np.arange(12), [users, 1]))  # this line
        elif self.way == "range":
            places = torch.tensor([list(range(12)) for _ in range(users)])  # this line
        else:
            places = torch.arange(length).expand(users, length)
        return self.items(items) + self.positions(places)


def ids(users: int) -> Tensor:
    return torch.randint(0, 50, (users, 12))


@pytest.mark.parametrize("way", ["numpy", "range"])
def test_the_line_is_named_once_the_size_has_changed(way: str) -> None:
    model = Positions(way)
    first = capture(model, (ids(3),))
    assert not first.fixed
    (told,) = capture(model, (ids(4),), earlier=[first]).fixed
    assert told.reason.startswith("makes a number of args[0].shape[0]")
    with open(__file__) as file:
        assert file.readlines()[int(told.place.line.removeprefix("test_fixed.py:")) - 1].endswith("# this line\n")
    assert not capture(model, (ids(3),), earlier=[first]).fixed, "another capture of the same sizes"


def test_the_report_tells_it() -> None:
    with torch.no_grad():
        for way, told in (("numpy", True), ("torch", False)):
            model = Positions(way)
            fast = fxopt.optimize(model)
            for users in (3, 4):
                torch.testing.assert_close(fast(items := ids(users)), model(items))
            assert ("each size of it has a graph of its own" in " ".join(str(fxopt.report(fast)).split())) is told


def test_so_does_the_warning_when_there_are_too_many() -> None:
    with torch.no_grad():
        fast = fxopt.optimize(Positions("range"), config=fxopt.Config(max_captures=2))
        for users in (3, 4, 5):
            fast(ids(users))
    reason = fxopt.report(fast).signatures[-1].eager_reason
    assert "Config.max_captures = 2: test_fixed.py:" in reason and "makes a number of args[0].shape[0]" in reason
