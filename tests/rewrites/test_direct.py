"""direct: the shorter way gives the same values; thousands of arguments arrive where they belong."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import Config, optimize
from fxopt.rewrites.framework import direct


def test_bindings_take_the_overloads_arguments() -> None:
    def program(x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.linear(x, w).relu()
        pooled = y.unsqueeze(1).expand(-1, 3, -1).sum(1, keepdim=True).squeeze(1)
        parts = torch.cat([y[:, 1:3], y[:, ::2], pooled.narrow(1, 0, 2)], 1).split(2, 1)
        crossed = torch.einsum("bi,bj->bij", y, y), torch.tensordot(y, w, dims=([1], [0]))
        picked = torch.nn.functional.embedding(ids, w).transpose(0, 1).flatten(0, 1)
        stacked = torch.stack([part.softmax(1) for part in parts[:2]], 1).mean([1], keepdim=False)
        masked = torch.where(picked > 0, picked, 0.5).clamp(-1, 1).pow(2).amax(-1)
        edited = torch.zeros_like(x).fill_(1).copy_(x).scatter_(1, ids, 2.0).scatter_(1, ids, x, reduce="add")
        edited.index_add_(0, ids[:, 0] % 4, x[:3], alpha=2)
        edited = edited.clone(memory_format=torch.contiguous_format).scatter(1, ids, x).index_add(1, ids[0], x[:, :2])
        return (
            *parts,
            *crossed,
            edited,
            picked,
            stacked,
            masked,
            y.view(-1).to(torch.float64),
            torch.add(y, y, alpha=2),
        )

    tensors = torch.randn(4, 6), torch.randn(5, 6), torch.randint(0, 5, (3, 2))
    module = make_fx(program, pre_dispatch=True)(*tensors)
    expected = module(*tensors)
    direct.direct(module)
    left = {str(node.target) for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert left == {"aten.split.Tensor", "aten.einsum.default", "aten.tensordot.default"}, (
        "only these have Python bindings"
    )
    for one, other in zip(module(*tensors), expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


class Parts(nn.Module):
    """Parts that are read and written in as many ways as chance has: seven statements by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        o = torch.zeros_like(x)
        for _ in range(7):
            index = tuple(self.item(chance, size) for size in (1, 6, 8)[: chance.randint(1, 3)])
            kind = chance.randrange(8)
            if kind == 0:
                o[index] = x[index]
            elif kind == 1:
                o[index] += x[index] * 2
            elif kind == 2:
                o[:, chance.randrange(-6, 6)] = x[:, ids[chance.randrange(3)]].mean(1)
            elif kind == 3:
                o = o + x[index].sum()
            elif kind == 4:
                o[:, ids[0]] = x[:, ids[1]] + o[:, ids[2]]
            elif kind == 5:
                o[o > x] = 0.5
            elif kind == 6:
                o[..., chance.randrange(8)] = o[..., ids[0]].sum(-1)
            else:
                o = torch.where(o > x[:, ids].amax((1, 2))[:, None], o.clone(), x[:, :1, 1:2])
        return o

    def item(self, chance: random.Random, size: int) -> Any:
        ends = [None, 0, 1, -1, 2, size, 2 * size]
        if size == 1 or chance.random() < 0.7:
            first, last = (None, None) if size == 1 else (chance.choice(ends), chance.choice(ends))
            return slice(first, last, chance.choice((None, None, 1, 2)))
        return chance.randrange(-size, size)


@pytest.mark.parametrize("asks", [False, True])
def test_parts_are_read_and_written_as_in_eager(asks: bool) -> None:
    merged = 0
    for seed in range(14):
        model, ids = Parts(seed), torch.tensor([[1, 5], [0, 2], [-1, 3]])
        fast = optimize(model, (torch.randn(5, 6, 8).requires_grad_(asks), ids), Config(verify="off", tune="off"))
        for batch in (5, 1, 3):
            values = torch.randn(batch, 6, 8)
            x, y = values.clone().requires_grad_(asks), values.clone().requires_grad_(asks)
            found, expected = fast(x, ids), model(y, ids)
            assert torch.equal(found, expected), f"seed {seed}, batch {batch}"
            if asks:
                found.sum().backward(), expected.sum().backward()
                torch.testing.assert_close(x.grad, y.grad, msg=f"seed {seed}, batch {batch}")
        merged += sum(node.target is operator.setitem for node in executed(fast))
    assert merged > 5


def test_the_calls_of_indexing() -> None:
    def program(x: Tensor, ids: Tensor) -> Tensor:
        o = torch.zeros_like(x)
        o[:, :-1, 2:] = x[:, 1:, 2:]
        o[:, 3] = x[:, ids][:, 0]
        o[:, 1:, 4] += 1
        return o[:, 2:][:, 1:, 3]

    tensors = torch.randn(4, 6, 8), torch.tensor([1, 2])
    module = make_fx(program, pre_dispatch=True)(*tensors)
    expected = module(*tensors)
    direct.direct(module)
    names = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    read, written, rows = ["getitem", "setitem"], ["getitem", "add_", "setitem"], ["getitem", "select", "setitem"]
    assert names == ["zeros_like", *read, *rows, *written, "getitem", "getitem"]
    assert torch.equal(module(*tensors), expected)


class Makers(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        B, count = x.size(0), x.numel()
        top, index = x.topk(2)
        plain = [torch.zeros(B, 3), torch.ones(2, B, dtype=torch.int32), torch.full((B,), 2.5), torch.full((B,), True)]
        counted = [torch.arange(count), torch.arange(1, B + 1, dtype=torch.float32), torch.arange(0, 2 * B, 2)]
        new = [x.new_zeros(B, 2), x.new_ones(3), x.new_full((B, 1), 7), x.new_zeros((2, B), dtype=torch.bool)]
        like = [torch.zeros_like(x.t()), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 3)]
        return [*plain, *counted, *new, *like, top, index, torch.maximum(x, x.neg()), torch.minimum(x, x.abs())]


def test_makers_and_sizes() -> None:
    model = Makers()
    fast = optimize(model, (torch.randn(5, 3),))
    left = [node.target for node in executed(fast) if isinstance(node.target, torch._ops.OpOverload)]
    assert not left
    for batch in (5, 2, 0, 1):
        x = torch.randn(batch, 3)
        for found, expected in zip(fast(x), model(x), strict=True):
            assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert len(fast._fxopt.entries) == 1


def executed(model: nn.Module) -> list[Node]:
    return list(model._fxopt.entries[0].executable.run.__self__.graph.nodes)


class Lengths(nn.Module):
    """Values by feature, as a jagged batch splits them."""

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in values.split(lengths.tolist())])


class EditedLengths(nn.Module):
    """The lengths change between the first reading and the last."""

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        first, second = lengths.unbind()
        before = first.item()
        lengths.add_(1)
        return values.sum() * before + values.sum() * second.item()


def test_sizes_in_a_tensor_are_read_at_once() -> None:
    model = Lengths()
    fast = optimize(model, (torch.randn(6), torch.tensor([1, 2, 3])))
    targets = [node.target for node in executed(fast)]
    assert torch.Tensor.tolist in targets and torch.Tensor.item not in targets and torch.unbind not in targets
    for lengths in ([4, 0, 3], [0, 0, 0], [1, 2, 3]):
        values = torch.randn(sum(lengths))
        assert torch.equal(fast(values, torch.tensor(lengths)), model(values, torch.tensor(lengths)))


def test_sizes_that_are_edited_meanwhile_are_read_one_by_one() -> None:
    model = EditedLengths()
    fast = optimize(model, (torch.ones(6), torch.tensor([1, 2])))
    for lengths in ([4, 0], [1, 2]):
        assert torch.equal(fast(torch.ones(3), torch.tensor(lengths)), model(torch.ones(3), torch.tensor(lengths)))


def test_many_arguments_arrive_in_order() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(11, 3) for _ in range(direct._MANY))
            self.dense = nn.Linear(2, 5)

        def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
            columns = [table(i) for table, i in zip(self.tables, ids, strict=True)]
            return torch.cat([*columns[:7], self.dense(dense), *columns[7:]], 1)

    model = Many()
    ids = [torch.randint(0, 11, (4,)) for _ in model.tables]
    fast = optimize(model)
    with torch.no_grad():
        for batch in (4, 1, 0):
            arguments = torch.randn(batch, 2), [i[:batch] for i in ids]
            assert torch.equal(fast(*arguments), model(*arguments))
    assert len(fast._fxopt.entries) == 1


@torch.library.custom_op("fxopt_tests::may_move", mutates_args=())
def may_move(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("code", ["", "size", "leaf", "operator", "edit"])
def test_tensors_are_read_ahead_unless_code_between_may_move_them(code: str) -> None:
    graph, kinds = Graph(), list[str]()
    places = [graph.placeholder(f"p{number}") for number in range(70)]
    if code == "leaf":
        graph.call_module("leaf", (places[0],))
    elif code == "size":
        graph.call_function(torch.ops.aten.sym_size.int, (places[0], 0))
    elif code == "operator":
        graph.call_function(torch.ops.fxopt_tests.may_move.default, (places[0],))
    elif code == "edit":
        graph.call_function(torch.ops.aten.copy_.default, (places[0], places[1]))

    def bound(tensors: Sequence[Tensor]) -> Tensor:
        kinds.append(type(tensors).__name__)
        return tensors[69] + 1

    bound.reads_in_place = True  # type: ignore[attr-defined]
    call = graph.call_function(torch.ops.aten.cat.default, (places,))
    call.meta["bound"] = bound
    graph.output(call)
    module = GraphModule(nn.ModuleDict({"leaf": nn.Identity()}), graph)
    direct.direct(module, states=30)
    tensors = [torch.randn(3) for _ in range(70)]
    with torch.no_grad():
        found = module.forward(*tensors)
    assert kinds == (["Picked"] if code in ("", "size") else ["tuple"]) and torch.equal(found, tensors[69] + 1)
