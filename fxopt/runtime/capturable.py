"""Which graphs CUDA can capture once and replay, and the twin of one that is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxopt.facts import facts_of
from fxopt.normalize import records_nothing
from fxopt.patterns.row_wise import Rows
from fxopt.rewrites.framework.direct import copied, direct
from fxopt.shape.aliases import has_effects, is_random
from fxopt.shape.calls import arguments_of
from fxopt.torch_internals.storage import storage_number


class NoGraph(Exception):
    """Why a captured graph would not do what the call does."""


def suited(graph: Graph, n_state: int, on_host: Sequence[bool]) -> torch.device:
    """The one CUDA device of a graph without gradients and side effects.

    Raises:
        NoGraph: it is none.
    """
    if not records_nothing(graph):
        raise NoGraph("gradients are on; they serve torch.no_grad() and torch.inference_mode()")
    (output,) = graph.find_nodes(op="output")
    returned = [node.meta["val"] if isinstance(node, Node) else None for node in output.args[0]]
    if not returned or not all(isinstance(value, Tensor) and value.is_cuda for value in returned):
        raise NoGraph("an output that is no CUDA tensor")
    held = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    memory = [n.meta["val"] for n in held if isinstance(n.meta.get("val"), Tensor)] + returned
    if len({storage_number(value) for value in memory}) < len(memory):
        raise NoGraph("an output shares the memory of another tensor")
    placeholders = graph.find_nodes(op="placeholder")
    for node, host in zip(placeholders[n_state:], on_host, strict=True):
        if host and any(user.target not in _MOVES for user in node.users):
            raise NoGraph(f"{node.name} is on the CPU and is not only moved to the GPU")
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output", "call_function"):
            raise NoGraph(f"{node.name} calls an opaque module")
        if node.op == "call_function" and (has_effects(node) or is_random(node)):
            raise NoGraph(f"{node.name} has an effect beyond its result")
    state = [n.meta["val"] for n in placeholders[:n_state]]
    devices = {value.device for value in [*state, *returned] if isinstance(value, Tensor)}
    if len(devices) != 1:
        raise NoGraph(f"tensors on {', '.join(sorted(map(str, devices)))}")
    (device,) = devices
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())


_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout}


def clamps(module: GraphModule) -> bool:
    """Whether some call counts the ids outside their table that it moves into it."""
    calls = ((facts_of(node.target).clamps, node) for node in module.graph.nodes)
    return any(clamps(getattr(module, _plan(node))) for clamps, node in calls if clamps is not None)


def _plan(node: Node) -> str:
    """The name of the constant that is a call's argument `plan`."""
    plan: Any = arguments_of(node)["plan"]
    return str(plan.target)


def ready(module: GraphModule, rows: Rows | None) -> tuple[GraphModule, list[Any]]:
    """A twin to capture, and where it puts the tensors that it keeps by size: the graph reads them at each replay."""
    fast, kept = copied(module), list[Any]()
    for node in fast.graph.nodes:
        if _arrives(node):
            node.meta["bound"] = lambda tensor, *_, **__: tensor
            continue
        padded = facts_of(node.target).padded
        if rows is not None and padded is not None:
            setattr(fast, _plan(node), padded(getattr(module, _plan(node))))
        elif "bound" in node.meta and not any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
            node.meta["bound"] = _keeping(node.meta["bound"], kept)
    direct(fast, inference=True)
    return fast, kept


def _arrives(node: Node) -> bool:
    """A move to the GPU, alone, of an input that the staging has moved already."""
    source = node.args[0] if node.target in _MOVES else None
    if not isinstance(source, Node) or source.op != "placeholder" or len(source.users) > 1:
        return False
    before, after = source.meta["val"], node.meta["val"]
    return before.device.type == "cpu" and before.dtype == after.dtype


def _keeping(make: Callable[..., Tensor], kept: list[Any]) -> Callable[..., Tensor]:
    def constant(*sizes: int) -> Tensor:
        tensor = make(*sizes)
        kept.append(tensor)
        return tensor

    return constant
