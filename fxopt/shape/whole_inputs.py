"""Inputs that must be contiguous for a result to be: what a graph takes for granted of a call, and its guards ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.fx import Graph, Node

from fxopt.shape.calls import closure
from fxopt.shape.standing import analysed
from fxopt.shape.strides import Layout, Strides

_WHOLE, _TORN = "whole", "torn"


def needed_for(node: Node, strides: Strides) -> list[Node] | None:
    """The inputs of the model behind `node`: where they are contiguous, so is it.

    Args:
        strides: what is known whatever the strides of the inputs are.

    Returns:
        None where `node` need not be contiguous even then.
    """
    if analysed(node.graph, _if_whole).known(node) is not Layout.CONTIGUOUS:
        return None

    def loose(nodes: Iterable[Node]) -> Iterator[Node]:
        return (each for each in nodes if strides.known(each) is not Layout.CONTIGUOUS)

    reached = closure(loose([node]), lambda each: loose(each.all_input_nodes))
    return [each for each in node.graph.find_nodes(op="placeholder") if each in reached and "input" in each.meta]


def _if_whole(graph: Graph) -> Strides:
    """Where all inputs of the model are contiguous."""
    placeholders = graph.find_nodes(op="placeholder")
    return Strides(graph, [Layout.CONTIGUOUS if "input" in each.meta else Layout.ANY for each in placeholders])


def take_for_granted(inputs: Sequence[Node]) -> bool:
    """That these are contiguous, which the graph's guards will ask; or, where they were not all so in the capture, that
    they are not, so that a call with contiguous ones gets a capture of its own. Returns whether they were."""
    whole = all(node.meta.get("contiguous", False) for node in inputs)
    if whole:
        for node in inputs:
            node.meta[_WHOLE] = True
    else:
        inputs[0].meta.setdefault(_TORN, set()).add(tuple(inputs))
    return whole


def taken_for_granted(graph: Graph) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Those among the inputs of the model that are contiguous, by number, and groups of which not all are."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if "input" in node.meta]
    number = {node: place for place, node in enumerate(inputs)}
    whole = tuple(number[node] for node in inputs if node.meta.get(_WHOLE))
    torn = {tuple(number[each] for each in group) for node in inputs for group in node.meta.get(_TORN, ())}
    return whole, tuple(sorted(torn))
