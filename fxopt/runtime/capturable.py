"""Which graphs CUDA can capture once and replay, and the twin of one that is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxopt.facts import facts_of
from fxopt.normalize import records_nothing
from fxopt.rewrites.framework.direct import copied, direct
from fxopt.runtime.executable import Executable
from fxopt.shape.aliases import has_effects, is_random, mutates
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import static
from fxopt.torch_internals.storage import storage_number
from fxopt.torch_internals.symbols import free_unbacked_symbols


class NoGraph(Exception):
    """Why a captured graph would not do what the call does."""


def suited(executable: Executable) -> torch.device:
    """The one CUDA device of a graph that records no gradients, has no side effects and never waits for the device.

    Raises:
        NoGraph: it is none; the reason names the line of the model, where there is one.
    """
    assert executable.graph is not None
    graph, n_state = executable.graph.graph, len(executable.capture.state)
    if not records_nothing(graph):
        raise NoGraph("gradients are on; they serve torch.no_grad() and torch.inference_mode()")
    placeholders = graph.find_nodes(op="placeholder")
    if not is_on_cuda(executable):
        raise NoGraph("nothing of it is on a CUDA device")
    names = dict(zip(placeholders[n_state:], (spec.name for spec in executable.capture.inputs), strict=True))
    for node in graph.nodes:
        reason = _unmoved(node, names[node]) if node in names else _obstacle(node)
        if reason:
            place = node.meta.get("place")
            raise NoGraph(f"{reason} ({place})" if place is not None else reason)
    (output,) = graph.find_nodes(op="output")
    returned = [node.meta["val"] if isinstance(node, Node) else None for node in output.args[0]]
    if not returned or not all(isinstance(value, Tensor) and value.is_cuda for value in returned):
        raise NoGraph("it returns or stores something that is no CUDA tensor")
    held = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    memory = [n.meta["val"] for n in held if isinstance(n.meta.get("val"), Tensor)] + returned
    if len({storage_number(value) for value in memory}) < len(memory):
        raise NoGraph("an output shares the memory of another tensor")
    state = (n.meta["val"] for n in placeholders[:n_state])
    devices = {value.device for value in [*state, *returned] if isinstance(value, Tensor) and not _is_number(value)}
    if len(devices) != 1:
        raise NoGraph(f"tensors on {', '.join(sorted(map(str, devices)))}")
    (device,) = devices
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())


def is_on_cuda(executable: Executable) -> bool:
    """Whether any tensor of the graph is on a CUDA device."""
    nodes = executable.graph.graph.nodes if executable.graph is not None else ()
    return any(isinstance(value := node.meta.get("val"), Tensor) and value.is_cuda for node in nodes)


def draws(graph: Graph) -> Node | None:
    """The first call that draws random numbers."""
    return next(filter(is_random, graph.nodes), None)


_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout}
_PUTS = {torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default}


def _unmoved(node: Node, name: str) -> str:
    """Why an input on the CPU cannot be staged ("" where it can): all that it is for is to be moved."""
    if node.meta["val"].is_cuda or all(user.target in _MOVES for user in node.users):
        return ""
    return f"{name} is on the CPU and is not only moved to the GPU; move it before the call"


def _obstacle(node: Node) -> str:
    """What a replay would leave out of what a call does, or could not wait for; "" for nothing."""
    if node.op not in ("placeholder", "get_attr", "output", "call_function"):
        return f"{node.name} calls an opaque module, whose Python no replay runs"
    if node.op != "call_function":
        return ""
    if _writes(node):
        return f"{node.name} has an effect beyond its result"
    if facts_of(node.target).keeps:
        return f"{node.name} keeps copies of weights, which no replay would renew"
    if any(map(_is_sparse, node.all_input_nodes)):
        return f"{node.name} reads a sparse tensor, whose kernels wait for the device"
    if _waits(node):
        return f"{node.name} waits for the device, because the host needs the values of a tensor"
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not value.is_cuda and not _is_constant_number(node):
        return f"{node.name} is computed on the CPU"
    if node.target in _MOVES and any(_is_made_on_cpu(source) for source in node.all_input_nodes):
        return f"{node.name} moves what was computed on the CPU"  # from memory that is gone at the replay
    return ""


def _is_sparse(node: Node) -> bool:
    value = getattr(node.graph.owning_module, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is not torch.strided


def _writes(node: Node) -> bool:
    """Random numbers are no effect: a replay draws new ones (see Recorder)."""
    if is_random(node):
        values = tree_leaves(node.meta["val"])
        return mutates(node) or not all(isinstance(value, Tensor) and value.is_cuda for value in values)
    return has_effects(node)


def _waits(node: Node) -> bool:
    """Whether the host has to know values of tensors: a number, the count of a mask's ones, a copy to the CPU."""
    reads = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if not any(value.is_cuda for value in reads):
        return False
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not value.is_cuda:
        return True
    if isinstance(node.target, OpOverload) and torch.Tag.data_dependent_output in node.target.tags:
        return True
    if node.target in _PUTS:
        _, indices, values, *_ = map(_value, node.args)
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        return masked and static(values.numel()) != 1  # a single value is filled in
    return value is not None and bool(free_unbacked_symbols(value) - free_unbacked_symbols(reads))


def _value(argument: Any) -> Any:
    """What stands for an argument in the trace."""
    return map_arg(argument, lambda node: node.meta.get("val"))


def _is_number(value: Tensor) -> bool:
    """Of the CPU, which a launch takes along: its value at each call is compared with that in the graph."""
    return not value.is_cuda and value.dim() == 0


def _is_made_on_cpu(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and not value.is_cuda


def _is_constant_number(node: Node) -> bool:
    """A number on the CPU that is the same at each call."""
    return _is_number(node.meta["val"]) and not any(n.op == "placeholder" for n in node.all_input_nodes)


def clamps(module: GraphModule) -> bool:
    """Whether some call counts the ids outside their table that it moves into it."""
    calls = ((facts_of(node.target).clamps, node) for node in module.graph.nodes)
    return any(clamps(getattr(module, _plan(node))) for clamps, node in calls if clamps is not None)


def _plan(node: Node) -> str:
    """The name of the constant that is a call's argument `plan`."""
    plan: Any = arguments_of(node)["plan"]
    return str(plan.target)


def ready(module: GraphModule, padded_rows: bool) -> tuple[GraphModule, list[Any]]:
    """A twin to capture, and where it puts the tensors that it keeps by size: the graph reads them at each replay."""
    fast, kept = copied(module), list[Any]()
    for node in fast.graph.nodes:
        if _arrives(node):
            node.meta["bound"] = lambda tensor, *_, **__: tensor
            continue
        padded = facts_of(node.target).padded
        if padded_rows and padded is not None:
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
