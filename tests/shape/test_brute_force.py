"""Every value that eager computes lies within the values claimed, over all small numbers and each dtype's extremes."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from fxopt.shape.ranges import Ranges
from fxopt.shape.values import Values
from tests.shape.index_programs import DTYPES, OPERATIONS, Programs, every_value

aten = torch.ops.aten
GRAPHS, PER_GRAPH, STEPS = 100, 60, 6  # 6000 programs


def programs(seed: int, operations: list = OPERATIONS, count: int = PER_GRAPH) -> Programs:
    """One graph of `count` programs, each over an input of some dtype."""
    made = Programs(seed)
    inputs = [made.input(every_value(dtype)) for dtype in DTYPES]
    for _ in range(count):
        made.grow(STEPS, [made.random.choice(inputs)], operations)
    made.graph.output(())
    made.graph.owning_module = GraphModule(made.literals, made.graph)
    return made


def within(tensor: torch.Tensor, values: Values) -> bool:
    """Whether every element is one of `values`; in doubles where the elements are floats."""
    nan = torch.isnan(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
    if nan.any() and not values.nan:
        return False
    numbers = (tensor.double() if tensor.is_floating_point() else tensor.long())[~nan]
    allowed = torch.zeros_like(numbers, dtype=torch.bool)
    for low, high in values.intervals:
        allowed |= (numbers >= low) & (numbers <= high)
    return bool(allowed.all())


def violations(made: Programs) -> list[str]:
    """Nodes with a value outside of what is claimed."""
    ranges = Ranges(made.graph)
    found = []
    for node, value in made.values.items():
        if isinstance(value, torch.Tensor) and not within(value, ranges.of(node).values):
            found.append(f"{node.format_node()}: {value.dtype} {ranges.of(node)}\n{value.flatten()[:200]}")
    return found


@pytest.mark.parametrize("part", range(4))
def test_no_value_is_outside(part: int) -> None:
    torch.set_num_threads(1)
    for seed in range(part, GRAPHS, 4):
        found = violations(programs(seed))
        assert not found, f"seed {seed}: {found[0]}"
