"""What a captured graph asks of the operators that it calls, without knowing them (fxopt/facts.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import Config, optimize
from fxopt.kernels.columns.encode import plan_of
from fxopt.patterns.core import calls_of_ours
from fxopt.patterns.row_wise import Rows
from fxopt.runtime.capturable import clamps, ready


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(30, 4, mode="sum") for _ in range(2))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([table(ids, offsets) for table in self.tables], 1)


def graph(bad_ids: str) -> GraphModule:
    config = Config(tune="off", bad_ids=bad_ids)
    inputs = torch.randint(0, 30, (9,)), torch.tensor([0, 2, 2, 5])
    with torch.no_grad():
        (entry,) = optimize(Bags().eval(), inputs, config)._fxopt.entries
    return entry.executable.graph


def last_included(module: GraphModule, twin: GraphModule) -> bool:
    """What the plan that `twin` holds says of the last bag, for the one call of columns in `module`."""
    (call,) = calls_of_ours(module.graph, "fxopt::columns")
    (found,) = {column.bag.include_last for column in plan_of(getattr(twin, call.args[2].target)).columns}
    return found


@pytest.mark.parametrize("bad_ids", ["raise", "clamp", "unchecked"])
def test_ids_are_counted_where_they_are_clamped(bad_ids: str) -> None:
    assert clamps(graph(bad_ids)) is (bad_ids == "clamp")


def test_the_last_bag_of_a_padded_batch_ends_with_the_ids_there_are() -> None:
    module = graph("raise")
    for rows in (None, Rows()):
        twin, _ = ready(module, rows)
        assert last_included(module, twin) is (rows is not None)
        assert not last_included(module, module), "the graph itself is not padded"
