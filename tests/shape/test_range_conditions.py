"""Value ranges: conditions, edits, what a claim says about itself, and large graphs."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.shape.ranges.analysis import Ranges
from tests.shape.known import Inputs, Program, known, traced

aten = torch.ops.aten
INT64 = "[-9223372036854775808, 9223372036854775807]"
MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("expected", "program"),
    [
        (True, lambda t: t.b >= 0),
        (True, lambda t: t.b <= 100),
        (False, lambda t: t.b < 0),
        (False, lambda t: t.b > 100),
        (None, lambda t: t.b > 99),
        (None, lambda t: t.b <= 99),
        (True, lambda t: torch.le(torch.tensor(0), t.b)),
        (False, lambda t: t.b == -1),
        (True, lambda t: t.b != -1),
        (None, lambda t: t.b != 7),
        (True, lambda t: torch.where(t.b == 7, 8, t.b) != 7),
        (True, lambda t: (t.b >= 0) & (t.b <= 100)),
        (None, lambda t: (t.b >= 0) & (t.i <= 100)),
        (False, lambda t: (t.b < 0) | (t.b > 100)),
        (False, lambda t: ~(t.b >= 0)),
        (True, lambda t: (t.b >= 0).all()),
        (True, lambda t: (t.b >= 0).all(1)),
        (False, lambda t: (t.b < 0).any()),
        (None, lambda t: (t.b[:0] >= 0).any()),  # of nothing
        (True, lambda t: (t.b >= 0).any(1)),
        (None, lambda t: t.i >= 0),
        (True, lambda t: t.i <= MOST),
        (None, lambda t: t.x <= 0.5),
        (None, lambda t: t.x.clamp(0, 1) >= 0),  # not of NaN
        (True, lambda t: t.x.nan_to_num().clamp(0, 1) >= 0),
        (False, lambda t: t.x.clamp(0, 1) < 0),
        (False, lambda t: t.b.isnan()),
        (None, lambda t: t.x.isnan()),
        (False, lambda t: t.x.nan_to_num().isnan()),
        (True, lambda t: t.x.nan_to_num().isfinite()),
        (False, lambda t: t.b.isinf()),
        (True, lambda t: t.i == t.i),
        (None, lambda t: t.x == t.x),
        (None, lambda t: t.u >= -1),  # -1 wraps around
        (True, lambda t: t.b < torch.tensor([200, 300, 101])),
        (False, lambda t: torch.isin(t.b, torch.tensor([-1, 200]))),
        (None, lambda t: (t.b * 2654435761).int() >= 0),
        (None, lambda t: t.b <= t.b.amax()),
        (True, lambda t: t.b + 0.5 > 0),
    ],
)
def test_conditions(expected: bool | None, program: Program) -> None:
    module = traced(program)
    output = next(iter(reversed(module.graph.nodes)))
    assert Ranges(module.graph).condition(output.args[0]) is expected


def test_an_edited_value_is_everything() -> None:
    def program(t: Inputs) -> Tensor:
        ids = t.b.clone()
        view = ids[1:]
        view.sub_(7)
        return torch.where(ids < 0, 0, ids)

    assert str(known(program).values) == INT64


def test_a_condition_on_what_is_edited_since_says_nothing() -> None:
    def program(t: Inputs) -> Tensor:
        edited = t.k.view(-1)[:1]  # of an input: the edit stays
        below = t.b + edited < 0
        t.k.mul_(-1)
        return torch.where(below, 0, t.b + edited).clamp(min=-5)

    assert str(known(program).values) == "[-5, 2147483747]"


def test_state_is_everything() -> None:
    """A buffer can be assigned or loaded."""
    module = traced(lambda t: torch.tensor([1, 2, 3])[t.i % 3])
    for node in module.graph.nodes:
        node.meta.pop("literal", None)
    output = next(iter(reversed(module.graph.nodes)))
    assert str(Ranges(module.graph).of(output.args[0]).values) == INT64


@pytest.mark.parametrize(
    ("because", "program"),
    [
        ("bucketize over 100 edges", lambda t: t.b.reshape(-1)[:7]),
        ("remainder by 1000", lambda t: t.i % 1000),
        ("clamped to [0, 99]", lambda t: t.i.clamp(0, 99)),
        ("clamped to [-1, inf]", lambda t: t.i.clamp(min=-1)),
        ("bucketize over 100 edges, plus {1}", lambda t: t.b + 1),
        ("bucketize over 100 edges", lambda t: t.b.clamp(0, 100)),
        ("[0, 100] (bucketize over 100 edges) >= {0} is always True", lambda t: t.b >= 0),
        ("arange to 10", lambda t: torch.arange(10)),
        ("any int64", lambda t: t.i),
    ],
)
def test_because(because: str, program: Program) -> None:
    assert known(program).because == because


def test_deep_graphs_need_no_recursion() -> None:
    graph = Graph()
    node = graph.placeholder("ids")
    for step in range(3000):
        node = graph.call_function(
            *((aten.flip.default, (node, [0])) if step else (aten.remainder.Scalar, (node, 101)))
        )
        node.meta["val"] = torch.empty(4, dtype=torch.int64, device="meta")
    graph.find_nodes(op="placeholder")[0].meta["val"] = node.meta["val"]
    assert str(Ranges(graph).of(node).values) == "[0, 100]"


def test_a_thousand_guarded_columns_take_less_than_ten_times_as_long_as_building_their_graph() -> None:
    """Three times as long where this was written; process time, so that other work does not count."""
    gc.collect()
    gc.freeze()  # what earlier tests left is not searched for garbage again and again
    started = time.process_time()
    graph, last = _guarded_columns(1000)
    built = time.process_time()
    ranges = Ranges(graph)
    known = [ranges.of(node) for node in graph.nodes]
    ended = time.process_time()
    gc.unfreeze()
    assert ended - built < 10 * (built - started)
    assert str(ranges.of(last).values) == "[1, 3295]" and len(known) == 9001


def _guarded_columns(columns: int) -> tuple[Graph, Node]:
    """Nine calls a column, and the last column's last call."""
    graph = Graph()
    features = graph.placeholder("features")
    features.meta["val"] = torch.empty(4, columns, dtype=torch.int64, device="meta")

    def call(target: object, *args: object, dtype: torch.dtype = torch.int64) -> Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(4, dtype=dtype, device="meta")
        return node

    for column in range(columns):
        rows = 100 + column  # every column by numbers of its own
        i = call(aten.remainder.Scalar, call(aten.select.int, features, 1, column), rows)
        i = call(aten.clamp.default, i, 0, rows)
        i = call(aten.where.ScalarSelf, call(aten.lt.Scalar, i, 0, dtype=torch.bool), 0, i)
        i = call(aten.remainder.Scalar, call(aten.add.Tensor, call(aten.mul.Tensor, i, 3), 1), 3 * rows + 2)
        last = call(aten.reshape.default, i, [-1, 1])
    return graph, last
