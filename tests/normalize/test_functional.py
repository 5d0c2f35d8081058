"""In-place edits: which become functional operators, and which must stay."""

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
from fxopt.normalize.functional import functional_overload
from fxopt.shape.aliases import mutates

aten = torch.ops.aten
X, IDS = torch.randn(5, 4), torch.randint(0, 6, (5,))


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.total = nn.Buffer(torch.zeros(4))
        self.spelled = forward

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.spelled(self, x, ids)


def normalized(forward: Callable[..., Any], training: bool = False, inference: bool = False) -> GraphModule:
    """The graph; its answers, and what it does to its inputs and its state, are checked against eager."""
    model = Model(forward).train(training)
    captured = capture(model, (X, IDS))
    normalize(captured.graph, inference)
    captured.graph.graph.lint()
    captured.graph.recompile()
    for batch in (5, 1, 3):
        twin = Model(forward).train(training)
        twin.load_state_dict(model.state_dict())
        args, others = ((X[:batch].clone(), IDS[:batch].clone()) for _ in range(2))
        try:
            expected = twin(*args)
        except ValueError:  # batch norm wants more than one row
            continue
        state = [slot.read(model) for slot in captured.state]
        found = captured.graph(*state, *others)
        for left, right in zip(found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            assert torch.equal(left, right)
        assert torch.equal(args[0], others[0])
        for name, tensor in twin.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
    return captured.graph


def edits(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function" and mutates(node)]


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def chain(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logit = x.new_zeros(x.shape[0], 1)
    for step in range(3):
        logit += x[:, step : step + 1]
    return logit


def setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


FUNCTIONAL: list[Callable[..., Any]] = [
    chain,
    lambda m, x, i: F.dropout(m.linear(x).relu_(), 0.5, False),
    lambda m, x, i: m.table(i).view(-1, 2).mul_(x.view(-1, 2)),
    lambda m, x, i: (x + 1).sigmoid_().sub_(0.5).div_(x).clamp_(-1, 1),
    lambda m, x, i: (x + 1).masked_fill_(x > 0, 3.0),
    lambda m, x, i: (x + 1).zero_() + torch.empty_like(x).fill_(2),
    lambda m, x, i: setitem(x + 1, x > 0, 2.0),
    lambda m, x, i: setitem(x * 2, slice(None), 1.0),
    lambda m, x, i: (x * 2).pow_(x.relu()),
    lambda m, x, i: torch.einsum("ij,jk->ik", x, m.linear.weight).div_(2),
    lambda m, x, i: torch.einsum("nij,nkj->nik", x.view(-1, 2, 2), x.view(-1, 2, 2)).div_(2),
    lambda m, x, i: m.linear(x.view(-1, 1, 4).expand(-1, 3, 4).transpose(0, 1)).transpose(0, 1).add_(x.unsqueeze(1)),
    lambda m, x, i: m.linear(x).unsqueeze_(1).squeeze(1).transpose_(0, 1),
    lambda m, x, i: (x * 2).add_(1)[:, 1:3] * 2,
    lambda m, x, i: torch.tensor([[1.0]]).add_(x.sum()) + x,
    lambda m, x, i: m.linear(x).detach_() + 1,
]


@pytest.mark.parametrize("number", range(len(FUNCTIONAL)))
def test_an_edit_of_memory_that_only_the_graph_knows(number: int) -> None:
    assert edits(normalized(FUNCTIONAL[number])) == []


def view_read_later(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    rows = m.table(ids)
    first = rows[:, 0]
    rows += 1
    return first + rows[:, 1]


def base_read_later(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    rows = m.table(ids)
    rows[:, 0].mul_(2)
    return rows * 1.5


def hidden_view_read_later(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """einsum's transpose is a view that its schema does not speak of."""
    rows = m.linear(x)
    turned = torch.einsum("ij->ji", rows)
    rows.add_(1)
    return turned * 1.5


def hidden_view_of_an_edit(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    rows = m.linear(x).relu_()
    turned = torch.einsum("ij->ji", rows)
    rows.add_(1)
    return turned * 1.5


def without_gradients(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """The values change, and the gradient does not know it."""
    rows = m.linear(x)
    with torch.no_grad():
        rows.mul_(2)
    return rows * 1.5


def moving_average(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        m.total.mul_(0.9).add_(x.detach().sum())
    return x + m.total


STAY: dict[str, Callable[..., Any]] = {
    "an input": lambda m, x, i: x.add_(1) * 2,
    "a view of an input": lambda m, x, i: x[:, 0].add_(1) * 2,
    "what may be an input": lambda m, x, i: x.contiguous().add_(1) * 2,
    "state": moving_average,
    "a view is read later": view_read_later,
    "the base is read later": base_read_later,
    "part of an output": lambda m, x, i: setitem(x * 2, (slice(None), 0), 1.0),
    "the memory is an output": lambda m, x, i: (lambda y: (y, y.view(-1).add_(1)))(x * 2),
    "an undeclared view": hidden_view_read_later,
    "an undeclared view of an edit": hidden_view_of_an_edit,
    "under no_grad": without_gradients,
}


@pytest.mark.parametrize("name", STAY)
def test_an_edit_that_others_can_see_stays(name: str) -> None:
    assert edits(normalized(STAY[name]))


def test_another_dtype_stays() -> None:
    """x.add_(double) keeps x's dtype, x.add(double) does not."""
    module = normalized(lambda m, x, i: (x * 2).add_(x.double() / 3))
    assert edits(module) == ["add_"]


def test_an_edit_that_nobody_reads_goes() -> None:
    module = normalized(lambda m, x, i: (setitem(x * 2, (slice(None), 0), 1.0), x + 1)[1])
    assert targets(module) == [aten.add.Tensor]


def test_a_random_edit_stays() -> None:
    module = capture(Model(lambda m, x, i: torch.empty_like(x).bernoulli_(0.5) * 0), (X, IDS)).graph
    normalize(module)
    assert edits(module)


def test_a_copy_is_functional_where_it_needs_no_derivative() -> None:
    def forward(m: Model, x: Tensor, ids: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(ids[:, None]) + 1

    assert edits(normalized(forward)) == ["copy_"]
    with torch.no_grad():
        assert edits(normalized(forward, inference=True)) == []


def test_batch_norm_in_training_writes_its_statistics() -> None:
    def forward(m: Model, x: Tensor, ids: Tensor) -> Tensor:
        m.norm(x)  # nobody reads it
        return m.norm(x) + m.norm(x)

    assert targets(normalized(forward, training=True)).count(aten.batch_norm.default) == 3
    assert targets(normalized(forward)).count(aten.batch_norm.default) == 1


def test_gradients_of_an_edited_chain() -> None:
    def forward(m: Model, x: Tensor, ids: Tensor) -> Tensor:
        rows = m.table(ids).mul_(x)
        rows += m.linear(rows * 2)
        return rows.relu_()

    model = Model(forward)
    captured = capture(model, (X, IDS))
    normalize(captured.graph)
    assert edits(captured.graph) == []
    gradients = []
    for call in (model, lambda *args: captured.graph(*[slot.read(model) for slot in captured.state], *args)[0]):
        model.zero_grad()
        call(X, IDS).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 3
    assert all(map(torch.equal, *gradients))


def test_overloads_are_found_by_their_arguments() -> None:
    assert functional_overload(aten.add_.Tensor) is aten.add.Tensor
    assert functional_overload(aten.pow_.Tensor) is aten.pow.Tensor_Tensor
    assert functional_overload(aten.index_put_.default) is aten.index_put.default
    assert functional_overload(aten.embedding_renorm_.default) is aten.embedding_renorm.default
    assert functional_overload(aten.resize_.default) is aten.resize.default
    assert functional_overload(aten.set_.source_Tensor_storage_offset) is None
    assert functional_overload(aten._foreach_add_.Scalar) is None
