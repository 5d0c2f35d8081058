"""Adding to a graph: nodes with their fake values, and the rule that nothing may be learned about sizes by the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxopt.capture.settings import Changed
from fxopt.config import Config
from fxopt.kernels.cuda_build import Kernels, missing
from fxopt.kernels.operators import Operators
from fxopt.patterns.core import place_of
from fxopt.patterns.groups import behind, hoisted
from fxopt.shape.aliases import Aliases, undeclared_views
from fxopt.shape.sizes import Size, inferred, same, shape_of
from fxopt.torch_internals.fake_tensors import FakeTensorMode, mode_of
from fxopt.torch_internals.patches import OBLIVIOUS
from fxopt.torch_internals.shape_env import TraceShapeEnv, questions
from fxopt.torch_internals.symbols import environment_of, expression, free_unbacked_symbols
from fxopt.torch_internals.tracing import enable_python_dispatcher

# Up to torch 2.12 matmul and linear take symbolic sizes only as Python decompositions, which double the time of a call.
decomposed = enable_python_dispatcher if torch.__version__ < "2.13" else nullcontext


class Rejected(Exception):
    """A replacement that does not hold; its text is the reason."""


@dataclass
class Editor:
    """Adds nodes to a graph before `point`, each with its fake value. It can only add."""

    module: GraphModule
    point: Node
    config: Config = Config()
    added: list[Node] = field(default_factory=list)
    moved: list[tuple[Node, Node]] = field(default_factory=list)
    missing: str = ""  # why calls that were added run without a kernel

    def needs(self, library: Kernels) -> None:
        """Says that a call is the library's on CUDA; where it cannot be built, `missing` tells the report why."""
        device = pytree.tree_leaves(self.point.meta["val"])[0].device
        if device.type == "cuda" and torch.cuda.is_available() and (why := missing(library, device.index)):
            self.missing = f"its CUDA kernel is not used: {why}"

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of an operator, with its shape and dtype worked out on fake tensors."""
        with self.module.graph.inserting_before(self.point):
            node = self.module.graph.call_function(target, args, kwargs)
        self.added.append(node)
        node.meta["place"] = place_of(self.point)
        fake_args = map_arg(args, lambda argument: argument.meta["val"])
        with fake_mode_of(self.module) as mode, _asking(mode, target), as_captured(), decomposed():
            node.meta["val"] = target(*fake_args, **map_arg(kwargs, lambda argument: argument.meta["val"]))
        undeclared_views(node)
        return node

    def ours(self, operators: Operators, name: str, bound: Callable[..., Any] | None, *args: Any) -> Node:
        """A call of one of our operators, in whose place the finished graph calls `bound`, past the dispatcher; None:
        its kernel, which is told everything by tensors."""
        operators.load()
        if operators.cuda is not None:
            self.needs(operators.cuda)
        node = self.call(getattr(torch.ops.fxopt, name).default, *args)
        node.meta["bound"] = bound or operators.call_of(name)
        return node

    def shaped(self, node: Node, sizes: Sequence[Size]) -> Node:
        """A view in these sizes.

        Raises:
            Rejected: more than one of them depends on the inputs.
        """
        if (shape := inferred(sizes)) is None:
            raise Rejected(f"a view in the sizes {list(sizes)} needs more than one size of the inputs")
        return self.call(torch.ops.aten.view.default, node, shape)

    def in_shape_of(self, old: Node, node: Node) -> Node:
        """A value for `old`, in its shape where that has another number of dims. Raises Rejected as `shaped` does."""
        shape = shape_of(old)
        return node if len(shape_of(node)) == len(shape) else self.shaped(node, shape)

    def known(self, value: Any, target: Callable[..., Any], *args: Any) -> Node:
        """A call whose value is known already."""
        with self.module.graph.inserting_before(self.point):
            node = self.module.graph.call_function(target, args)
        self.added.append(node)
        node.meta |= {"place": place_of(self.point), "val": value}
        return node

    def respelled(self, node: Node, args: tuple[Any, ...]) -> Node:
        """The same call with arguments that mean the same, in front of it; nothing is left to work out."""
        with self.module.graph.inserting_before(node):
            twin = self.module.graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        self.added.append(twin)
        twin.meta = {key: fact for key, fact in node.meta.items() if key != "views"}
        undeclared_views(twin)
        return twin

    @contextmanager
    def at(self, point: Node) -> Iterator[None]:
        """What is added stands in front of another node."""
        before, self.point = self.point, point
        try:
            yield
        finally:
            self.point = before

    def twins(self, nodes: Sequence[Node]) -> dict[Node, Node]:
        """The same calls once more, which read each other where the old ones do."""
        twins: dict[Node, Node] = {}
        self.repeat(nodes, twins)
        return twins

    def repeat(self, nodes: Sequence[Node], twins: dict[Node, Node]) -> None:
        """The same calls once more, added to `twins`; where an old one reads what has a twin, they read the twin."""
        for node in nodes:
            with self.module.graph.inserting_before(self.point):
                twins[node] = self.module.graph.node_copy(node, lambda read: twins.get(read, read))
            self.added.append(twins[node])

    def constant(self, name: str, tensor: torch.Tensor, like: Node | None = None) -> Node:
        """A tensor that belongs to the graph and not to the model's state, on the device of `like`."""
        tensor = tensor if like is None else tensor.to(like.meta["val"].device)
        unique = next(n for n in _numbered(f"_{name}") if not hasattr(self.module, n))
        setattr(self.module, unique, tensor)
        with self.module.graph.inserting_before(self.point):
            node = self.module.graph.create_node("get_attr", unique)
        self.added.append(node)
        mode = fake_mode_of(self.module)
        node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        return node

    def parameter(self, outer: Node) -> Node:
        """A node of another graph, as the first parameter of this one."""
        graph = self.module.graph
        taken = {node.target for node in graph.find_nodes(op="placeholder")}
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(next(name for name in _numbered(outer.name) if name not in taken))
        node.meta["val"] = outer.meta["val"]
        return node

    def hoist(self, nodes: Sequence[Node]) -> None:
        """Move pure nodes, in graph order, before the point."""
        for node in nodes:
            self.moved.append((node, node.next))
            self.point.prepend(node)

    def hoist_for(self, reads: Sequence[Node], aliases: Aliases | None = None) -> None:
        """Move what a call at the point needs to read these nodes.

        Args:
            aliases: those of the graph before this pass began, where they are known.

        Raises:
            Rejected: something in between may not move.
        """
        needed = (each for node in behind(self.point, reads) for each in (node, *node.all_input_nodes))
        if aliases is None or not all(map(aliases.knows, needed)):  # the pass itself has added some of it
            aliases = Aliases(self.module.graph)
        late = hoisted(self.point, reads, aliases)
        if late is None:
            raise Rejected("a tensor it reads is made by an operator that may not move")
        self.hoist(late)

    def undo(self) -> None:
        for node in reversed(self.added):
            self.module.graph.erase_node(node)
        for node, following in reversed(self.moved):
            following.prepend(node)


def fake_mode_of(module: GraphModule) -> FakeTensorMode:
    """The fake mode that a captured graph's values live in."""
    for node in module.graph.nodes:
        mode = mode_of(node.meta.get("val"))
        if mode is not None:
            return mode
    return FakeTensorMode()


def learn(unknown: Size, known: Size) -> None:
    """Tell the shape environment a proven fact: every shape downstream then says `known`."""
    if not same(unknown, known):
        if not free_unbacked_symbols(unknown):
            raise Rejected(f"expected a size that depends on data to be {known}, found {unknown}")
        environment_of(unknown).learn(expression(unknown), expression(known))  # type: ignore[arg-type]


@contextmanager
def no_new_guards(module: GraphModule) -> Iterator[None]:
    """Refuses, when it ends, what only holds for some input sizes. A guard added after the capture would be no
    condition of the graph, and its consequence (s0 is 5) would reach every later rewrite.
    """
    with questions(fake_mode_of(module).shape_env) as asked:
        yield
    if asked:
        raise Rejected("it holds only for some input sizes")


def as_captured() -> Changed:
    """Sizes are not 0 or 1 by accident. Not for every match: torch takes 0.1 ms to change a setting."""
    return Changed([OBLIVIOUS])


@contextmanager
def _asking(mode: FakeTensorMode, target: Any) -> Iterator[None]:
    """As in the capture, what this operator's fake implementation asks about strides alone is no guard."""
    environment: Any = mode.shape_env
    if not isinstance(environment, TraceShapeEnv):
        yield
        return
    environment.operator = target
    try:
        yield
    finally:
        environment.operator = None


def _numbered(stem: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{stem}_{number}"
        number += 1
