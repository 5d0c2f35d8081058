"""An edit of memory that may be shared with state is a barrier for every read of it, whatever alias made it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of

UNVERIFIED = fxopt.Config(verify="off", tune="off")


class Layers(nn.Module):
    """Three layers and three tables, an edit before each is used; two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.tables = nn.ModuleList([nn.Embedding(7, 3) for _ in range(3)])
        self.normed = nn.ModuleList([nn.Embedding(7, 3, max_norm=0.7) for _ in range(2)])
        self.tied = nn.Embedding(7, 3)
        self.tied.weight = self.normed[0].weight
        whole, rows = torch.randn(5), torch.randn(9, 5)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole.view(5)[1:4])
        self.register_buffer("other", torch.randn(5))
        self.upper, self.lower = nn.Parameter(rows[:5]), nn.Parameter(rows[2:])
        self.counting = Counting()


class Counting(nn.Module):
    """Stays opaque, and edits a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1 if float(x.sum()) > -1e9 else 2)
        return x + 0


def each_layer(edit: Callable[[nn.Linear], object]) -> Callable:
    def forward(model: Layers, x: Tensor, ids: Tensor) -> Tensor:
        for layer in model.layers:
            edit(layer)
            x = torch.relu(layer(x))
        return x

    return forward


def each_table(edit: Callable[[nn.Embedding], object]) -> Callable:
    def forward(model: Layers, x: Tensor, ids: Tensor) -> Tensor:
        columns = []
        for number, table in enumerate(model.tables):
            edit(table)
            columns.append(table(ids[:, number]))
        return torch.cat(columns, -1)

    return forward


def around(read: Callable, edit: Callable) -> Callable:
    """Reads, edits, and reads the same again."""

    def forward(model: Layers, x: Tensor, ids: Tensor) -> tuple:
        before = read(model, x, ids)
        edit(model)
        return before, read(model, x, ids)

    return forward


@torch.no_grad()
def quietly(edit: Callable, *values: Tensor) -> None:
    edit(*values)


def first_row(table: nn.Embedding) -> None:
    with torch.no_grad():
        table.weight[0].zero_()


def sigmoid_of(name: str) -> Callable:
    return lambda m, x, ids: x * torch.sigmoid(m.get_buffer(name))


FORWARDS = {
    "clamp of .data": each_layer(lambda layer: layer.weight.data.clamp_(min=0)),
    "clamp under no_grad": each_layer(lambda layer: quietly(torch.relu_, layer.weight)),
    "abs of detach().t()": each_layer(lambda layer: layer.weight.detach().t()[:, 1:].abs_()),
    "every other number": each_layer(lambda layer: layer.weight.data.view(-1)[::2].relu_()),
    "unbind of .data": each_layer(lambda layer: layer.bias.data.unbind(0)[1].fill_(0.3)),
    "foreach": each_layer(lambda layer: torch._foreach_mul_([layer.weight.data, layer.bias.data], 0.5)),
    "a layer twice": around(lambda m, x, ids: m.layers[0](x), lambda m: m.layers[0].weight.data.mul_(0.5)),
    "a later layer": lambda m, x, ids: (
        torch.relu(m.layers[1](x)),
        m.layers[1].weight.data.mul_(0.5),
        m.layers[0](x) + m.layers[1](x),
    )[::2],
    "padding row": each_table(first_row),
    "padding row by .data": each_table(lambda table: table.weight.data[0].zero_()),
    "padding row by index": each_table(lambda table: table.weight.detach().index_fill_(0, torch.tensor([0]), 0.0)),
    "padding row by setitem": each_table(lambda table: table.weight.data.__setitem__(slice(0, 2), 0.5)),
    "one table": around(lambda m, x, ids: m.tables[0](ids[:, 0]), lambda m: first_row(m.tables[0])),
    "max_norm": lambda m, x, ids: torch.cat([table(ids[:, i]) for i, table in enumerate(m.normed)], -1),
    "max_norm, tied": lambda m, x, ids: (m.tied(ids[:, 0]), m.normed[0](ids[:, 1]), m.tied(ids[:, 0])),
    "a buffer made as a view": around(sigmoid_of("whole"), lambda m: m.part.mul_(0.5)),
    "the base of a buffer": around(
        lambda m, x, ids: x[:, :3] * torch.sigmoid(m.part), lambda m: m.whole.mul_(0.5)
    ),
    "Parameters of one storage": around(
        lambda m, x, ids: F.linear(x, m.upper), lambda m: m.lower.data.mul_(0.5)
    ),
    "tables of one storage": around(
        lambda m, x, ids: F.embedding(ids[:, 0].clamp(max=4), m.upper), lambda m: m.lower.data[0].zero_()
    ),
    "out=": around(sigmoid_of("other"), lambda m: torch.mul(m.other.detach(), 0.5, out=m.other)),
    "copy_": around(sigmoid_of("other"), lambda m: m.other.copy_(m.whole)),
    "as_strided": around(sigmoid_of("whole"), lambda m: m.whole.as_strided((2,), (2,)).zero_()),
    "a leaf's own buffer": lambda m, x, ids: (
        x * torch.sigmoid(m.counting.seen),
        m.counting(x),
        x * torch.sigmoid(m.counting.seen),
    ),
    "a view of state as a result": lambda m, x, ids: (m.other[1:], x + m.other, m.other.add_(1) * 1)[:2],
    "an input": lambda m, x, ids: (m.layers[0](x), x.data.mul_(2), m.layers[0](x))[::2],
    "a view of an input": lambda m, x, ids: (torch.relu(x), x.detach()[:, 0].zero_(), torch.relu(x))[::2],
}  # fmt: skip


def make(forward: Callable, training: bool) -> Layers:
    torch.manual_seed(0)
    return type("Model", (Layers,), {"forward": forward})().train(training)


def same(left: object, right: object) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [UNVERIFIED, fxopt.Config()], ids=["unverified", "default"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", FORWARDS)
def test_reads_see_the_edits_that_eager_sees(name, mode, config):
    training = mode is torch.enable_grad
    model, twin = make(FORWARDS[name], training), make(FORWARDS[name], training)
    fast = fxopt.optimize(model, config=config)
    for batch in (4, 1, 0, 3):
        x, ids = torch.randn(batch, 5), torch.randint(0, 7, (batch, 3))
        other = x.clone()
        with mode():
            expected, found = twin(other, ids), fast(x, ids)
        same(found, expected)
        same(x, other)
        same(model.state_dict(), twin.state_dict())
        with torch.no_grad():  # what a training step does
            for one, two in zip(model.parameters(), twin.parameters(), strict=True):
                one.sub_(step := torch.randn_like(one))
                two.sub_(step)
    if name != "a leaf's own buffer":  # verification gives the graph another buffer than the leaf's
        assert not [found.eager_reason for found in dispatcher_of(fast).findings if found.eager_reason]


def test_an_edit_of_data_is_none_to_backward():
    def forward(model, x, ids):
        x = model.layers[0](x)
        model.layers[0].weight.data.mul_(0.5)
        return x

    x, ids = torch.randn(4, 5, requires_grad=True), torch.zeros(4, 3, dtype=torch.int64)
    gradients = []
    for model in (make(forward, True), fxopt.optimize(make(forward, True), config=UNVERIFIED)):
        (gradient,) = torch.autograd.grad(model(x, ids).sum(), x)
        gradients.append(gradient)
    same(*gradients)


class Scaled(nn.Module):
    """Edits its state between two reads of its input, or its first input between two reads of the second."""

    def __init__(self, edits: str) -> None:
        super().__init__()
        self.edits = edits
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.sigmoid(y)
        (self.scale if self.edits == "state" else x).mul_(0.5)
        return first + torch.sigmoid(y) * self.scale + x


@pytest.mark.parametrize("edits", ["state", "input"])
def test_inputs_that_share_memory_only_later(edits):
    """The capture has seen them apart: another one is made for calls where they overlap, and both are right."""

    def arguments(model: Scaled, how: int) -> tuple[Tensor, Tensor]:
        base = torch.linspace(1, 2, 8)
        ways = [(base[:4], base[4:].clone()), (base[:4], base[2:6]), (base[:4], base[:4]), (base[4:], model.scale[:4])]
        return ways[how]

    torch.manual_seed(0)
    model = Scaled(edits)
    torch.manual_seed(0)
    twin = Scaled(edits)
    fast = fxopt.optimize(model, config=UNVERIFIED)
    for how in (0, 1, 2, 3, 0, 2, 1, 3):
        expected, found = twin(*arguments(twin, how)), fast(*arguments(model, how))
        same(found, expected)
        same(model.scale, twin.scale)


def test_a_tensor_that_is_no_state_is_not_edited_by_looking():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = [torch.ones(4)]

        def forward(self, x):
            self.cache[0].mul_(0.5)
            return x * self.cache[0]

    fast = fxopt.optimize(Cached(), config=UNVERIFIED)
    fast(torch.randn(2, 4))
    assert "no buffer and no input" in dispatcher_of(fast).findings[0].eager_reason
