"""Regions of a graph that one tower program computes: linears in parallel, and what lies before, between and behind."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
from sympy.utilities.iterables import connected_components
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.groups import hoisted
from fxopt.patterns.towers.columns import JOINS, Columns
from fxopt.patterns.towers.steps import InputStep, LinearStep, Step, Steps
from fxopt.patterns.towers.terms import Terms
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static
from fxopt.shape.view_operators import VIEWS

aten = torch.ops.aten
StepsOf = dict[Node, set[int]]


@dataclass(frozen=True)
class Region:
    """outputs: the nodes that the call replaces, with the numbers of their columns, in graph order."""

    steps: Steps
    outputs: dict[Node, Tensor]


def find_towers(search: Search) -> Iterator[Match | Reject]:
    """Connected steps of which at least two linears do not wait for each other.

    late: what has to move in front of the call, unless another rewrite has moved it already.
    """
    linears = search.calls(aten.linear.default)
    if len(linears) < 2:
        return
    if not search.inference:  # what it computed would be computed once more, operator by operator, to be differentiated
        yield Reject("gradients are recorded: parallel linears and experts stay as they are", linears[0])
        return
    batches: dict[sympy.Expr, None] = {}
    for node in linears:
        batches.update((expression(size), None) for size in shape_of(node)[:1] if static(size) is None)
    for batch in batches:
        columns = Columns(search.graph, search.aliases, batch)
        steps_of = {node: _steps_of(columns, node) for node in columns.values}
        for component in _components(columns, steps_of):
            found = _region(search, columns, steps_of, component)
            if found is not None:
                yield found


def _components(columns: Columns, steps_of: StepsOf) -> list[frozenset[int]]:
    """Steps that read each other, or that are alike and read the same, or whose results are joined; a linear with and
    without its activation.
    """
    steps = columns.steps.steps
    together: list[tuple[int, int]] = []
    for node, of in steps_of.items():
        computed = [index for index in of if not isinstance(steps[index], InputStep)]
        if node.target in JOINS:
            together += [(index, computed[0]) for index in computed]
    alike: dict[object, int] = {}
    for index, step in enumerate(steps):
        together += [(index, run.step) for run in step.reads if not isinstance(steps[run.step], InputStep)]
        if isinstance(step, LinearStep):
            for key in (
                (step.x, step.weight),
                (step.x, tuple(map(expression, shape_of(step.weight))), step.activation),
            ):
                together.append((index, alike.setdefault(key, index)))
    components = connected_components((range(len(steps)), together))
    return [frozenset(component) for component in components if len(component) > 1]


def _region(search: Search, columns: Columns, steps_of: StepsOf, component: frozenset[int]) -> Match | Reject | None:
    steps = columns.steps
    inside = [node for node, of in steps_of.items() if of & component]
    later = _later(search.graph, steps, component, set(inside))
    held = component - later | {index for index, step in enumerate(steps.steps) if isinstance(step, InputStep)} - later
    outputs = _outputs(columns, [node for node in inside if steps_of[node] <= held], search.aliases)
    needed = steps.needed(run.step for numbers in outputs.values() for run in steps.runs(numbers))
    if not outputs or not _in_parallel(steps, needed):
        return None
    anchor = min(outputs)
    reads = list(dict.fromkeys(node for index in needed for node in _read_by(steps[index])))
    late = hoisted(anchor, reads, search.aliases)
    if late is None:
        return Reject("what it reads is computed too late: something in between may not move", anchor)
    region = Region(steps, dict(sorted(outputs.items())))
    return Match(anchor, {"region": region, "nodes": list(outputs), "reads": reads, "late": late})


def _steps_of(columns: Columns, node: Node) -> set[int]:
    """The steps that a node's value is made of."""
    value, numbers = columns.values[node], columns.numbers_in(node)
    parts = [value.left, value.right] if isinstance(value, Terms) else value if isinstance(value, list) else [value]
    parts = [part for part in (*parts, numbers) if isinstance(part, Tensor)]
    return {run.step for part in parts for run in columns.steps.runs(part)}


def _later(graph: Graph, steps: Steps, component: frozenset[int], inside: set[Node]) -> set[int]:
    """The inputs that depend, through other operators, on what the component computes, and the steps that read them:
    another round's.
    """
    behind: set[Node] = set()
    for node in graph.nodes:
        if any(n in behind or (n in inside and node not in inside) for n in node.all_input_nodes):
            behind.add(node)
    behind |= inside
    later = {index for index, step in enumerate(steps.steps) if isinstance(step, InputStep) and step.node in behind}
    for index in sorted(component):
        if any(run.step in later for run in steps[index].reads):
            later.add(index)
    return later


def _outputs(columns: Columns, inside: list[Node], aliases: Aliases) -> dict[Node, Tensor]:
    """What the rest of the graph reads of the nodes inside: computed by the call, or as before from its outputs."""
    outputs: dict[Node, Tensor] = {}
    as_before = set(columns.values) - set(inside)
    for node in reversed(inside):
        if any(user not in columns.values or user in as_before for user in node.users):
            numbers = columns.numbers_in(node)
            if numbers is None or node.target in VIEWS or _is_callers_piece(node, aliases):
                as_before.add(node)
            else:
                outputs[node] = numbers
    return outputs


def _is_callers_piece(node: Node, aliases: Aliases) -> bool:
    """One of several views of a tensor that leaves the model, or of which one does: they share memory there."""
    return node.target is operator.getitem and node.args[0].target in VIEWS and aliases.leaves(node)  # type: ignore[union-attr]


def _in_parallel(steps: Steps, needed: list[int]) -> bool:
    """Whether there are two linears at one distance from the inputs."""
    depth: dict[int, int] = {}
    for index in needed:
        step = steps[index]
        waits = max((depth[run.step] for run in step.reads), default=0)
        depth[index] = waits + isinstance(step, LinearStep)
    level = Counter(depth[index] for index in needed if isinstance(steps[index], LinearStep))
    return any(count > 1 for count in level.values())


def _read_by(step: Step) -> list[Node]:
    match step:
        case InputStep(node, _):
            return [node]
        case LinearStep():
            return [step.weight] if step.bias is None else [step.weight, step.bias]
        case _:
            return []
