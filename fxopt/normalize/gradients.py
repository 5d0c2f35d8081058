"""Where forward turns gradients on or off on its way, and what may have one."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fxopt.torch_internals.autograd import set_grad_enabled

# Stands behind a result while passes run: it returns its argument itself, and no pattern looks through it.
BARRIER = torch.ops.aten.lift_fresh.default


def gradient_switches(graph: Graph) -> dict[Node, bool]:
    """The nodes that switch, and what they switch to."""
    return {node: bool(node.args[0]) for node in graph.nodes if node.target is set_grad_enabled}


def modes(graph: Graph) -> dict[Node, bool]:
    """Whether gradients are on where each node stands; a switch stands in front of what it switches."""
    switches, on, found = gradient_switches(graph), torch.is_grad_enabled(), dict[Node, bool]()
    for node in graph.nodes:
        found[node] = on
        on = switches.get(node, on)
    return found


def records_nothing(graph: Graph) -> bool:
    """Whether the caller has gradients off, and forward does not turn them on."""
    return not torch.is_grad_enabled() and not any(gradient_switches(graph).values())


def switches_gradients(graph: Graph) -> bool:
    """Whether forward turns gradients on or off at all."""
    return bool(gradient_switches(graph))


def is_float(node: Node) -> bool:
    """Whether it may have a gradient; of what has no value on its own nothing is known."""
    value = node.meta.get("val")
    if value is None:
        return True
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in values)
