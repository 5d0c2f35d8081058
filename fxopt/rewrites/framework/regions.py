"""What a replacement takes away and what it adds, cut out of the graph as two functions of the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt.patterns.branches import SIDE
from fxopt.rewrites.framework.direct import as_function
from fxopt.shape.aliases import has_effects, is_view
from fxopt.shape.convolved import placed_as_convolved
from fxopt.shape.rows import batch_symbol
from fxopt.shape.sizes import expression
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.symbols import hints_of
from fxopt.tune.tuner import Site

COMPUTES = "computes"  # in the meta of a packed call: what it computes, as graphs and numbers


class Region:
    """Nodes of a graph, in its order, that end in `outputs`; `reads` are the nodes outside that they read."""

    def __init__(self, inside: Sequence[Node], outputs: Sequence[Node]) -> None:
        self.inside = inside
        self.outputs = outputs
        members = set(inside)
        reads = [needed for node in inside for needed in node.all_input_nodes if needed not in members]
        self.reads = list(dict.fromkeys([*reads, *(node for node in outputs if node not in members)]))

    def graph(self, inputs: Sequence[Node]) -> Graph:
        """A graph of its own: from `inputs`, which hold all that it reads, to the tuple of its outputs."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
        for node in self.inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph


def before(values: Sequence[Node]) -> Region:
    """What nobody needs once `values` are replaced."""
    dying, unread = set(values), list(values)
    while unread:
        for node in unread.pop().all_input_nodes:  # asked again whenever one more of its users dies
            if node in dying or node.op != "call_function" or has_effects(node) or not dying.issuperset(node.users):
                continue
            dying.add(node)
            unread.append(node)
    return Region(sorted(dying), values)


def closed(region: Region) -> Region:
    """The same with the views of it that it reads itself, and that stay as others read them, too."""
    members = set(region.inside)
    between = {view for node in region.reads for view in _views_between(node, members)}
    return Region(sorted(members | between), region.outputs)


def _views_between(node: Node, region: set[Node]) -> list[Node]:
    """`node` and what it is a view of, up to something in the region; nothing where it is none of that."""
    found: list[Node] = []
    while node not in region:
        if not is_view(node):
            return []
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def after(added: Sequence[Node], values: Sequence[Node]) -> Region:
    """What was added, as far as `values` need it."""
    return Region(sorted(node for node in added if node.op != "get_attr"), values)


def inputs_of(regions: Sequence[Region]) -> list[Node]:
    return list(dict.fromkeys(node for region in regions for node in region.reads))


def site(graphs: Sequence[Graph], inputs: Sequence[Node], training: bool, rows: tuple[int, ...]) -> Site:
    """Two graphs of the same inputs as functions to be timed; on a GPU, and without gradients, as CUDA graphs."""
    functions = [as_function(graph, not training) for graph in graphs]
    values = [_constant(node) if node.op == "get_attr" else placed_as_convolved(node) for node in inputs]
    state = {number: tensor for number, node in enumerate(inputs) if (tensor := _state(node)) is not None}
    replayed = not training and any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    key = _key(graphs, values, training)
    key = key and key + "-replayed" * replayed
    return Site(functions[0], functions[1], values, key, training, rows, state, replayed)


def _state(node: Node) -> torch.Tensor | None:
    """The parameter or buffer itself, while the model has it in this form."""
    tensor = node.meta.get("tensor", lambda: None)()
    value = node.meta.get("val")
    return tensor if tensor is not None and tensor.shape == value.shape and tensor.dtype == value.dtype else None  # type: ignore[union-attr]


def _constant(node: Node) -> torch.Tensor:
    return getattr(node.graph.owning_module, str(node.target))


def module_of(graph: Graph) -> GraphModule:
    return GraphModule(torch.nn.Module(), graph)


def _key(graphs: Sequence[Graph], values: Sequence[Any], training: bool) -> str | None:
    """A digest of the operators, sizes and dtypes, by no name that another capture would give otherwise."""
    batch = batch_symbol(values)
    try:
        words = [str(training), *(_described(value, batch) for value in values), *map(_calls_in, graphs)]
    except _Unspeakable:
        return None
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:20]


class _Unspeakable(Exception):
    """A call of a function that says nothing of what it computes."""


def _calls_in(graph: Graph) -> str:
    place = {node: _Name(f"%{number}") for number, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{_target(node)} {map_arg((node.args, node.kwargs), place.__getitem__)}" + f" {SIDE}" * (SIDE in node.meta)
        for node in graph.nodes
        if node.op != "placeholder"
    )


def _target(node: Node) -> str:
    if not callable(node.target) or isinstance(node.target, OpOverload) or node.target.__module__ == "_operator":
        return str(node.target)
    if COMPUTES not in node.meta:
        raise _Unspeakable
    parts = (f"({_calls_in(part)})" if isinstance(part, Graph) else str(part) for part in node.meta[COMPUTES])
    return f"{node.target.__name__} {' '.join(parts)}"


class _Name(str):
    """A node's name in a key, without quotes."""

    __repr__ = str.__str__  # type: ignore[assignment]


def _described(value: Any, batch: Any) -> str:
    """Dtype, device, sizes and strides; a symbol is "B" or the size that it had in the capture."""
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return hashlib.sha256(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, torch.Tensor):
        sizes = [_size(size, batch) for size in (*value.shape, *value.stride())]
        return f"{value.dtype} {_device(value.device)} {sizes}"
    if isinstance(value, torch.SymInt):
        return _size(value, batch)
    return repr([_described(item, batch) for item in value]) if isinstance(value, list | tuple) else repr(value)


def _device(device: torch.device) -> str:
    """A GPU by its name, with what decides how fast its products are."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device)
    return f"{torch.cuda.get_device_name(device)} {torch.backends.cuda.matmul.fp32_precision}"


def _size(size: int | torch.SymInt, batch: Any) -> str:
    if isinstance(size, int):
        return str(size)
    hints = hints_of(size)
    term = expression(size)
    unknown, rows = sympy.symbols("? B")  # "?": it depends on data
    return str(term.subs({each: rows if each == batch else hints.get(each, unknown) for each in term.free_symbols}))


def rows_in(inputs: Sequence[Node]) -> tuple[int, int] | None:
    """(position, dim) of an input whose size there is the batch."""
    batch = batch_symbol([node.meta["val"] for node in inputs])
    if batch is None:
        return None
    for position, node in enumerate(inputs):
        value = node.meta["val"]
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if expression(size) == batch:
                return position, dim
    return None


def calls_of(node: Node) -> int:
    """How many operators run where this node does: one, none (a size, an item of a list), or those of a function."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.meta.get("calls", 0)
    return int(not isinstance(node.meta.get("val"), torch.SymInt | int))
