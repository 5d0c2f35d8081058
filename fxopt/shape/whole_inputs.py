"""Inputs that must be contiguous for a result to be: what a graph takes for granted of a call, and its guards ask."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from fxopt.shape.strides import Layout, Strides

_WHOLE = "whole"


def needed_for(node: Node, strides: Strides) -> list[Node] | None:
    """The inputs of the model, contiguous in the capture, behind `node`: where they are, so is it.

    Args:
        strides: what is known whatever the strides of the inputs are.

    Returns:
        None where `node` need not be contiguous even then.
    """
    inputs = node.graph.find_nodes(op="placeholder")
    whole = [each for each in inputs if "input" in each.meta and each.meta.get("contiguous", False)]
    given = [Layout.CONTIGUOUS if each in whole else Layout.ANY for each in inputs]
    if Strides(node.graph, given).known(node) is not Layout.CONTIGUOUS:
        return None
    reached, pending = dict[Node, None](), [node]
    while pending:
        each = pending.pop()
        if each not in reached and strides.known(each) is not Layout.CONTIGUOUS:
            reached[each] = None
            pending += each.all_input_nodes
    return [each for each in whole if each in reached]


def take_for_granted(inputs: Sequence[Node]) -> None:
    for node in inputs:
        node.meta[_WHOLE] = True


def taken_for_granted(graph: Graph) -> tuple[int, ...]:
    """Those among the inputs of the model, by number."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if "input" in node.meta]
    return tuple(number for number, node in enumerate(inputs) if node.meta.get(_WHOLE))
