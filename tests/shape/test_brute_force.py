"""Every value that eager computes lies within the values claimed, over all small numbers and each dtype's extremes;
and a graph without the checks that were proved dead gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from fxopt.rewrites.dead_checks import REWRITE
from fxopt.rewrites.framework.core import Fuel, apply
from fxopt.shape.ranges import rules
from fxopt.shape.ranges.analysis import Ranges
from fxopt.shape.ranges.operation import Known, Operation
from fxopt.shape.ranges.values import Values
from tests.shape.index_programs import DTYPES, OPERATIONS, Programs, every_value

aten = torch.ops.aten
GRAPHS, PER_GRAPH, STEPS = 84, 60, 5  # 5,040 programs


def programs(seed: int, count: int = PER_GRAPH) -> tuple[Programs, GraphModule]:
    """One graph of `count` programs, each over an input of some dtype; it returns the last values of each."""
    made = Programs(seed)
    inputs = [made.input(every_value(dtype)) for dtype in DTYPES]
    last: list[Node] = []
    for _ in range(count):
        pool = made.grow(STEPS, [made.random.choice(inputs)], OPERATIONS)
        last += [node for node in pool[1:][-2:] if isinstance(made.values[node], torch.Tensor)]
    made.graph.output(tuple(last))
    module = GraphModule(made.literals, made.graph)
    made.graph.owning_module = module
    return made, module


def within(tensor: torch.Tensor, values: Values) -> bool:
    """Whether every element is one of `values`."""
    nan = torch.isnan(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
    if nan.any() and not values.nan:
        return False
    numbers = (tensor.double() if tensor.is_floating_point() else tensor.long())[~nan]
    allowed = torch.zeros_like(numbers, dtype=torch.bool)
    for low, high in values.intervals:
        allowed |= (numbers >= low) & (numbers <= high)
    return bool(allowed.all())


def violations(made: Programs, ranges: Ranges) -> list[str]:
    """Nodes with a value outside of what is claimed."""
    return [
        f"{node.format_node()}: {value.dtype} claimed {ranges.of(node)}, found\n{value.flatten()[:200]}"
        for node, value in made.values.items()
        if isinstance(value, torch.Tensor) and not within(value, ranges.of(node).values)
    ]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, zeros by their sign too; one NaN is like another."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    equal = (left == right) & (left.signbit() == right.signbit())
    return bool((equal | (left.isnan() & right.isnan())).all())


@pytest.mark.parametrize("part", range(3))
def test_no_value_is_outside_and_none_changes(part: int) -> None:
    removed, known, decided = 0, 0, 0
    for seed in range(part, GRAPHS, 3):
        made, module = programs(seed)
        ranges = Ranges(module.graph)
        found = violations(made, ranges)
        assert not found, f"seed {seed}: {found[0]}"
        (results,) = [node.args[0] for node in module.graph.nodes if node.op == "output"]
        removed += len(apply(REWRITE, module, Fuel(None), True).changes)
        module.recompile()
        inputs = [value for node, value in made.values.items() if node.op == "placeholder"]
        for node, value in zip(results, module(*inputs), strict=True):
            assert same_bits(made.values[node], value), f"seed {seed}: {node.format_node()}\n{value}"
        known += sum(ranges.of(node).values != Values.of_dtype(node.meta["val"].dtype) for node in results)
        decided += sum(ranges.condition(node) is not None for node in results)
    assert removed > 400 and known > 1500 and decided > 150  # it does claim and remove


def changed_values(change: Callable[[Values, Operation], Values]) -> Callable[[Operation], Known | None]:
    def rule(op: Operation) -> Known | None:
        return Known(change(op.operand("self").values, op), "unsound")

    return rule


def _within_dtype(values: Values, op: Operation) -> Values:
    """As if nothing wrapped around."""
    assert op.dtype is not None
    return values & Values.of_dtype(op.dtype)


UNSOUND = {
    "remainder_of_a_negative_divisor": (aten.remainder, lambda values, op: Values.between(0, 60)),
    "last_bucket": (aten.bucketize, lambda values, op: Values.between(0, op.tensor("boundaries").shape[0] - 1)),
    "smallest_integer": (aten.abs, lambda values, op: values & Values.between(0, 2**63 - 1)),
    "negated_smallest_integer": (aten.neg, lambda values, op: Values.between(-values.max, 127)),
    "narrowing": (aten.to, lambda values, op: op.known("self").values & Values.of_dtype(op.dtype)),
    "sum_wraps": (aten.add, _within_dtype),
    "clamp_drops_nan": (aten.clamp, lambda values, op: Values(values.intervals)),
    "where_keeps_one_branch": (aten.where.self, lambda values, op: values),
    "fmod_is_positive": (aten.fmod, lambda values, op: Values.between(0, 2**63 - 1)),
    "mask_of_negatives": (aten.bitwise_and, lambda values, op: Values.between(0, 2**63 - 1)),
    "sign_of_nan": (aten.sign, lambda values, op: Values.only(-1, 1)),
    "never_nan": (aten.isnan, lambda values, op: Values.only(0)),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, change = UNSOUND[name]
    monkeypatch.setitem(rules.RULES, target, changed_values(change))
    assert any(violations(made, Ranges(module.graph)) for made, module in map(programs, range(8)))


def test_a_removal_that_is_not_dead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that are too strong take checks away, and the results differ."""
    for target in (aten.to, aten.add, aten.mul):
        monkeypatch.setitem(rules.RULES, target, changed_values(lambda values, op: Values.between(0, 3)))
    differ = 0
    for seed in range(4):
        made, module = programs(seed)
        (results,) = [node.args[0] for node in module.graph.nodes if node.op == "output"]
        apply(REWRITE, module, Fuel(None), True)
        module.recompile()
        inputs = [value for node, value in made.values.items() if node.op == "placeholder"]
        try:
            found = module(*inputs)
        except IndexError:  # an index that was a remainder before
            differ += 1
        else:
            differ += sum(not same_bits(made.values[n], v) for n, v in zip(results, found, strict=True))
    assert differ
