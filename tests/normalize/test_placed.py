"""Constants of sizes that a model makes on the CPU, for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxopt.normalize import normalize
from tests.cuda.on_a_gpu import graph_of

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


def causal(x: Tensor) -> Tensor:
    mask = torch.triu(torch.ones((1, x.shape[1], x.shape[1]), dtype=torch.uint8), diagonal=1)
    return x.unsqueeze(1) * (mask == 0).type_as(x)


MADE_THERE: dict[str, Function] = {
    "a mask": causal,
    "an index": lambda x: aten.index.Tensor(x, [torch.arange(len(x)), 2 * torch.arange(len(x)) % 3]),
    "an index that is written to": lambda x: aten.index_put.default(
        x, [torch.arange(len(x)).repeat_interleave(2), torch.arange(2).repeat(len(x))], x.narrow(1, 0, 2).reshape(-1)
    ),
    "repeated": lambda x: aten.index.Tensor(x, [torch.arange(len(x)).repeat_interleave(2)]),
    "a clone": lambda x: x + torch.arange(x.shape[1]).expand(2, -1).clone().select(0, 1).contiguous().to(x.device),
    "moved": lambda x: x + (torch.arange(x.shape[1]).to(x.device) * 2.5),
    "moved and cast": lambda x: x + torch.zeros(1, 1).expand(1, x.shape[1]).to(x.device, torch.float64),
}
LEFT: dict[str, Function] = {
    "rounded by the CPU": lambda x: x + torch.arange(3).div(7.0).exp().to(x.device),
    "edited": lambda x: x + torch.ones(x.shape[1]).mul_(2).to(x.device),
    "random": lambda x: x + torch.rand(x.shape[1]).to(x.device),
}


def made_on_the_cpu(function: Function) -> tuple[list[str], torch.fx.GraphModule]:
    module = graph_of(function, [(5, 3)])
    expected = module.graph.output_node().args[0].meta["val"]  # type: ignore[union-attr]
    changes = normalize(module, True).changes
    (found,) = [module.graph.output_node().args[0]]
    assert found.meta["val"].shape == expected.shape and found.meta["val"].dtype == expected.dtype  # type: ignore[union-attr]
    values = [(node.name, node.meta["val"]) for node in module.graph.nodes if node.op == "call_function"]
    assert all(change.what for change in changes)
    return [name for name, value in values if value.device.type == "cpu"], module


@pytest.mark.parametrize("name", MADE_THERE)
def test_made_where_it_is_read(name: str) -> None:
    left, module = made_on_the_cpu(MADE_THERE[name])
    assert not left
    for node in module.graph.nodes:  # the same graph on this machine
        if node.op == "call_function":
            node.args, node.kwargs = torch.fx.node.map_aggregate(
                (node.args, dict(node.kwargs)), lambda a: torch.device("cpu") if isinstance(a, torch.device) else a
            )
    module.recompile()
    x = torch.randn(5, 3)
    torch.testing.assert_close(module(x), MADE_THERE[name](x), rtol=0, atol=0)


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    left, _ = made_on_the_cpu(LEFT[name])
    assert left
