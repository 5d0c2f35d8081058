"""Calls of the same form are recorded without asking torch for theirs again."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fxopt.capture import capture
from fxopt.capture.forms import Forms


class Layers(nn.Module):
    """Of three forms, some of them repeated; one result is resized in place."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.other = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = (x * 2.0).unsqueeze_(0)
        y = (x * 2.0) + first.squeeze(0)
        for layer in self.same:
            y = layer(y.transpose(0, 1)).transpose(0, 1).relu() * x
        return torch.cat([self.other(y), self.other(y[:, :1]).expand(-1, y.shape[1], -1), y * 2], 2)


def test_one_question_for_each_form(check) -> None:
    model, answers = Layers(), Counter[bool]()
    again = Forms.again

    def counted(self: Forms, key: object, args: tuple) -> Tensor | None:
        result = again(self, key, args)
        answers[result is not None] += key is not None
        return result

    with torch.no_grad(), mock.patch.object(Forms, "again", counted):
        found = capture(model, (torch.rand(6, 7, 4),))
        for batch in (6, 1, 3, 0):
            check(found, model, torch.rand(batch, 7, 4))
    assert answers[True] >= 10
    for node in found.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        source, value = node.args[0].meta["val"], node.meta["val"]
        assert value.shape[:-1] == source.shape[:-1] and value.is_contiguous()


@pytest.mark.parametrize("other", [torch.rand(4).double(), torch.rand(())])
def test_other_dtypes_and_ranks_are_other_forms(check, other: Tensor) -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
            return x * y, x * z, x * y, z * x

    args = torch.rand(5, 4), torch.rand(4), other
    with torch.no_grad():
        found = capture(Mixed(), args)
        check(found, Mixed(), *args)
    (output,) = found.graph.graph.find_nodes(op="output")
    expected = [value.dtype for value in Mixed()(*args)]
    assert [node.meta["val"].dtype for node in output.args[0]] == expected


def test_gradients_keep_their_history() -> None:
    with mock.patch.object(Forms, "again", side_effect=lambda key, args: pytest.fail() if key else None):
        capture(Layers(), (torch.rand(6, 7, 4),))
