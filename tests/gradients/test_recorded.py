"""Operators recorded past the dispatcher: by many threads, under autocast, and without a compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.kernels.interactions import dot, pair_sum
from fxopt.kernels.operators import Operators


class Attentive(nn.Module):
    """A lookup, attention over its positions, and pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        scores = F.softmax(x @ x.transpose(1, 2) / 8**0.5, -1) @ x
        return scores.sum((1, 2)) + (x.sum(1) ** 2 - (x**2).sum(1)).sum(1)


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module, Tensor]:
    model = Attentive()
    return model, optimize(model, config=Config(tune="off")), torch.randint(0, 20, (17, 6))


def grads_of(y: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.float().sum(), list(model.parameters()), retain_graph=True)


def test_threads_go_back_through_one_graph(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    eager, fast, ids = models
    expected, y = grads_of(eager(ids), eager), fast(ids)
    assert "_Recorded" in "".join(map(str, graph_of(y)))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: grads_of(y, fast), range(200)):
            torch.testing.assert_close(found, expected)


def graph_of(y: Tensor) -> list[str]:
    names, nodes = list[str](), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [each for each, _ in node.next_functions]
    return names


def test_autocast_around_a_backward_changes_nothing(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    eager, fast, ids = models
    expected, y = grads_of(eager(ids), eager), fast(ids)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(grads_of(y, fast), expected)


@pytest.mark.parametrize("operators", [dot.OPERATORS, pair_sum.OPERATORS])
def test_gradients_without_kernels(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    operators.load()
    monkeypatch.setattr(operators, "compiled", lambda: False)
    x = torch.randn(5, 4, 8, requires_grad=True)
    i, j = torch.tril_indices(4, 4, -1)
    if operators is dot.OPERATORS:
        call = dot.OPERATORS.call_of("dot_interaction")
        found, expected = call([x], [], [], i, j), dot.dot_interaction([x], [], [], i, j)
    else:
        found, expected = pair_sum.call_of(0.5, True)(x, None, 0.5, True), pair_sum.pair_sum(x, None, 0.5, True)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))
