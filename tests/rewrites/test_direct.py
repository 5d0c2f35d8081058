"""direct: the shorter way gives the same values; thousands of arguments arrive where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import optimize
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
        return (*parts, *crossed, picked, stacked, masked, y.view(-1).to(torch.float64), torch.add(y, y, alpha=2))

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
