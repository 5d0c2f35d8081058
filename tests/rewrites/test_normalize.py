"""Normalization: fewer spellings, the same values, the same effects, the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture import capture
from fxopt.normalize import normalize

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.spelled = forward

    def forward(self, *args: Tensor) -> Any:
        return self.spelled(self, *args)


def normalized(forward: Callable[..., Any], *args: Tensor, training: bool = False) -> GraphModule:
    module = capture(Model(forward).train(training), args).graph
    normalize(module)
    module.graph.lint()
    return module


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


X = torch.randn(5, 4)
IDS = torch.randint(0, 4, (5,))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x.float() + 1,
        lambda m, x: x.to(torch.float32) + 1,
        lambda m, x: x.to("cpu") + 1,
        lambda m, x: x.type_as(x) + 1,
        lambda m, x: F.dropout(x, 0.5, training=False) + 1,
        lambda m, x: m.dropout(x) + 1,
    ],
)
def test_what_computes_nothing_goes(forward: Callable[..., Any]) -> None:
    assert targets(normalized(forward, X)) == [aten.add.Tensor]


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x.double() + 1,
        lambda m, x: x.to(torch.float32, copy=True).add_(1),
        lambda m, x: x.clone().add_(1),
    ],
)
def test_casts_that_copy_stay(forward: Callable[..., Any]) -> None:
    assert len(targets(normalized(forward, X))) == 2


def test_a_cast_that_is_edited_stays() -> None:
    """x.float() of a float is x itself, and the edit is one of x."""
    module = normalized(lambda m, x: (x.float().add_(1), x)[1], X)
    assert aten.add_.Tensor in targets(module)
    x = X.clone()
    module(*_state(module), x)
    torch.testing.assert_close(x, X + 1)


def _state(module: GraphModule) -> list[Tensor]:
    return [torch.randn(4, 4) for node in module.graph.nodes if node.op == "placeholder"][:-1]


def test_dropout_without_its_flag_is_random_in_eval_too() -> None:
    module = normalized(lambda m, x: F.dropout(x, 0.5) + 1, X)
    assert aten.dropout.default in targets(module)


def test_dropout_in_training_stays() -> None:
    assert aten.dropout.default in targets(normalized(lambda m, x: m.dropout(x), X, training=True))


def test_twins_merge() -> None:
    module = normalized(lambda m, x: x[:, 1].long() + x[:, 1].long(), X)
    assert targets(module).count(aten.select.int) == 1


def test_random_twins_do_not_merge() -> None:
    module = normalized(lambda m, x: torch.rand_like(x) - torch.rand_like(x), X)
    assert targets(module).count(aten.rand_like.default) == 2
    module = normalized(lambda m, x: F.dropout(x, 0.5) - F.dropout(x, 0.5), X)
    assert targets(module).count(aten.dropout.default) == 2


def test_twins_that_are_edited_do_not_merge() -> None:
    module = normalized(lambda m, x: (x[:, 1].add_(1), x[:, 1] * 2)[1], X)
    assert targets(module).count(aten.select.int) == 2


def test_a_conjugate_is_no_view_of_the_same_form() -> None:
    module = normalized(lambda m, x: (x.conj() * x, x.imag.neg()), torch.randn(3, dtype=torch.complex64))
    x = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(module(x)[0], x.conj() * x)


def test_numbers_of_other_types_are_other_numbers() -> None:
    module = normalized(lambda m, i: ((i + 1).float() + (i + 1.0)) + (i + True).float(), IDS)
    assert targets(module).count(aten.add.Tensor) == 5
    module = normalized(lambda m, x: x * 0.0 - x * -0.0, X)
    assert targets(module).count(aten.mul.Tensor) == 2


def test_twins_do_not_merge_across_no_grad() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.linear(x)
        return m.linear(x) - target

    module = normalized(forward, X)
    assert sum("linear" in str(target) for target in targets(module)) == 2


def test_dead_code_goes_and_effects_stay() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        x.exp()
        x.add_(1)
        return x * 2

    found = targets(normalized(forward, X))
    assert aten.exp.default not in found and aten.add_.Tensor in found


def test_literals_are_read_directly() -> None:
    module = normalized(lambda m, i: i + torch.tensor([1, 2, 3, 4, 5]), IDS)
    assert targets(module) == [aten.add.Tensor]
    (literal,) = [node for node in module.graph.nodes if node.op == "get_attr"]
    assert literal.meta["literal"]


def test_a_literal_that_is_edited_is_copied_first() -> None:
    module = normalized(lambda m, i: torch.tensor([1, 2, 3, 4, 5]).add_(i), IDS)
    args = [torch.randn(4, 4) for node in module.graph.nodes if node.op == "placeholder"][:-1]
    first = module(*args, IDS)[0].clone()
    assert torch.equal(module(*args, IDS)[0], first), "the second call starts from the literal again"
