"""Regions of a graph that one tower program computes: linears in parallel, and what lies before, between and behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject
from fxopt.patterns.embedding_columns.groups import hoisted
from fxopt.patterns.towers.columns import VIEWS, Columns
from fxopt.patterns.towers.steps import InputStep, LinearStep, Step, Steps
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """outputs: the nodes that the call replaces, with the numbers of their columns, in graph order."""

    steps: Steps
    outputs: dict[Node, Tensor]
    late: tuple[Node, ...]  # what has to move in front of the call


def find_towers(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Connected steps of which at least two linears do not wait for each other."""
    graph = module.graph
    linears = graph.find_nodes(op="call_function", target=aten.linear.default)
    if len(linears) < 2:
        return
    aliases = Aliases(graph)
    batches: dict[sympy.Expr, None] = {}
    for node in linears:
        batches.update((expression(size), None) for size in shape_of(node)[:1] if static(size) is None)
    for batch in batches:
        columns = Columns(graph, aliases, batch)
        for component in _components(columns):
            found = _region(module, columns, component, aliases)
            if found is not None:
                yield found


def _components(columns: Columns) -> list[frozenset[int]]:
    """Steps that read each other, or that are alike and read the same; a linear with and without its activation."""
    steps = columns.steps.steps
    parent = list(range(len(steps)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    alike: dict[object, int] = {}
    for index, step in enumerate(steps):
        for run in step.reads:
            if not isinstance(steps[run.step], InputStep):
                parent[root(index)] = root(run.step)
        if isinstance(step, LinearStep):
            for key in ((step.x, step.weight), (step.x, shape_of(step.weight), step.activation)):
                parent[root(index)] = root(alike.setdefault(key, index))
    together = defaultdict(set)
    for index, step in enumerate(steps):
        if not isinstance(step, InputStep):
            together[root(index)].add(index)
    return [frozenset(component) for component in together.values() if len(component) > 1]


def _region(
    module: GraphModule, columns: Columns, component: frozenset[int], aliases: Aliases
) -> Match | Reject | None:
    steps = columns.steps
    component = _first(module, columns, component)
    held = _held(columns, component)
    outputs = _outputs(columns, held)
    needed = _needed(steps, outputs)
    if not outputs or not _in_parallel(steps, needed):
        return None
    anchor = min(outputs)
    reads = [node for index in needed for node in _read_by(steps[index])]
    late = hoisted(module.graph, anchor, list(dict.fromkeys(reads)), aliases)
    if late is None:
        return Reject("what it reads is computed too late: something in between may not move", anchor)
    region = Region(steps, dict(sorted(outputs.items())), tuple(late))
    return Match(anchor, {"region": region, "nodes": list(outputs)})


def _held(columns: Columns, component: frozenset[int]) -> dict[Node, Tensor | None]:
    """The nodes of the component; with numbers where a call could give their value."""
    held: dict[Node, Tensor | None] = {}
    for node, value in columns.values.items():
        numbers = columns.numbers(node) if not isinstance(value, list) else None
        if node in columns.inputs:
            numbers = None
        of = _steps_of(columns, node)
        if of and of <= component:
            held[node] = numbers if node.target not in VIEWS else None
    return held


def _steps_of(columns: Columns, node: Node) -> set[int]:
    """All but inputs of the steps that a node's value is made of."""
    value = columns.values[node]
    if isinstance(value, Tensor):
        parts = [value]
    elif isinstance(value, list):
        parts = [part for part in value if isinstance(part, Tensor)]
    else:
        numbers = columns.numbers(node) if node not in columns.inputs else None
        parts = [value.left, value.right] if numbers is None else [numbers, value.left, value.right]
    steps = columns.steps
    return {run.step for part in parts for run in steps.runs(part) if not isinstance(steps[run.step], InputStep)}


def _first(module: GraphModule, columns: Columns, component: frozenset[int]) -> frozenset[int]:
    """Without the steps that read, through other operators, what the component computes: they come in a later round."""
    steps = columns.steps
    inside = {node for node in columns.values if _steps_of(columns, node) & component}
    behind: set[Node] = set()  # what depends on the component through operators that are not in it
    for node in module.graph.nodes:
        if (node not in inside and any(n in behind or n in inside for n in node.all_input_nodes)) or (node in inside and any(n in behind for n in node.all_input_nodes)):
            behind.add(node)
    later: set[int] = set()
    for index in sorted(component):
        step = steps[index]
        read = [steps[run.step] for run in step.reads]
        if any(isinstance(r, InputStep) and r.node in behind for r in read) or any(
            run.step in later for run in step.reads
        ):
            later.add(index)
    return component - later


def _outputs(columns: Columns, held: dict[Node, Tensor | None]) -> dict[Node, Tensor]:
    """What the rest of the graph reads of the nodes in the region."""
    outputs: dict[Node, Tensor] = {}
    stays: set[Node] = set()  # nodes of the region that are computed as before, from its outputs
    for node in reversed(list(held)):
        if any(user not in held or user in stays for user in node.users):
            numbers = held[node]
            if numbers is None:
                stays.add(node)
            else:
                outputs[node] = numbers
    return outputs


def _needed(steps: Steps, outputs: dict[Node, Tensor]) -> list[int]:
    unread = [run.step for numbers in outputs.values() for run in steps.runs(numbers)]
    needed: set[int] = set()
    while unread:
        index = unread.pop()
        if index not in needed:
            needed.add(index)
            unread += [run.step for run in steps[index].reads]
    return sorted(needed)


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
