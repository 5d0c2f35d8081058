"""The one place that edits graphs: transactional rewrites with fuel.

A replacement is inserted beside what it replaces, run on fake tensors and compared; only then do the users move.
Any failure removes the inserted nodes again and gives a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fxopt.capture.shape_env import TraceShapeEnv
from fxopt.findings import Change, Miss, PassFindings, Place
from fxopt.normalize import remove_dead_code
from fxopt.patterns.core import Match, Reject, place_of
from fxopt.shape.aliases import has_effects
from fxopt.shape.expressions import is_size
from fxopt.shape.sizes import Size, same, same_shape, tensor_of

_MOST_ROUNDS = 100  # matches that wait for one another need two or three; one that makes its own pattern, all of them


class Rejected(Exception):
    """A replacement that does not hold; its text is the reason."""


@dataclass
class Editor:
    """Adds nodes to a graph before `point`, each with its fake value. It can only add."""

    module: GraphModule
    point: Node
    added: list[Node] = field(default_factory=list)
    moved: list[tuple[Node, Node]] = field(default_factory=list)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of an operator, with its shape and dtype worked out on fake tensors."""
        with self.module.graph.inserting_before(self.point):
            node = self.module.graph.call_function(target, args, kwargs)
        self.added.append(node)
        node.meta["place"] = place_of(self.point)
        fake_args = map_arg(args, lambda argument: argument.meta["val"])
        with fake_mode_of(self.module) as mode, _asking(mode, target), _as_captured():
            node.meta["val"] = target(*fake_args, **map_arg(kwargs, lambda argument: argument.meta["val"]))
        return node

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
        twin.meta = dict(node.meta)
        return twin

    def constant(self, name: str, tensor: torch.Tensor) -> Node:
        """A tensor that belongs to the graph and not to the model's state."""
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
        with self.module.graph.inserting_before(next(iter(self.module.graph.nodes))):
            node = self.module.graph.placeholder(outer.name)
        node.meta["val"] = outer.meta["val"]
        return node

    def hoist(self, nodes: Sequence[Node]) -> None:
        """Move pure nodes, in graph order, before the point."""
        for node in nodes:
            self.moved.append((node, node.next))
            self.point.prepend(node)

    def undo(self) -> None:
        for node in reversed(self.added):
            self.module.graph.erase_node(node)
        for node, following in reversed(self.moved):
            following.prepend(node)


@dataclass(frozen=True)
class Replacement:
    """What a rewrite did at one match: new values for old nodes, and the words for the report.

    values: None stands for a node without a value, whose effect never happens.
    equal: sizes that depend on data, each with the size that it is proven to have.
    """

    values: Mapping[Node, Node | None]
    what: str
    why: str
    equal: tuple[tuple[Size, Size], ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """A named pass: find matches (or reasons why not), and replace each.

    find: yields Match and Reject for a graph module; `inference` tells whether gradients are off.
    replace: builds the replacement of one match through an Editor; raises Rejected where it does not hold.
    why: the reason for its place in the order of passes.
    """

    name: str
    find: Callable[[GraphModule, bool], Iterator[Match | Reject]]
    replace: Callable[[Editor, Match], Replacement]
    why: str


@dataclass
class Fuel:
    """How many rewrites may be applied, and which ones (by number) are left out."""

    limit: int | None = None
    skip: frozenset[int] = frozenset()
    used: int = 0

    @property
    def empty(self) -> bool:
        return self.limit is not None and self.used >= self.limit

    def take(self) -> int:
        """The number of the next rewrite."""
        self.used += 1
        return self.used - 1


def fake_mode_of(module: GraphModule) -> FakeTensorMode:
    """The fake mode that a captured graph's values live in."""
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return FakeTensorMode()


def calls_of(node: Node) -> int:
    """How many operators run where this node does: one, none (a size, an item of a list), or those of a function."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.meta.get("calls", 0)
    return int(not isinstance(node.meta.get("val"), torch.SymInt | int))


def apply(rewrite: Rewrite, module: GraphModule, fuel: Fuel, inference: bool) -> PassFindings:
    """Run one pass to its fixed point; every match is a transaction of its own."""
    findings, started = PassFindings(rewrite.name), time.perf_counter()
    refused: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        changed = False
        rejects = []
        for found in _found(rewrite, module, inference, findings):
            if isinstance(found, Reject):
                rejects.append(found)
                continue
            if found.anchor.name in refused or not _alive(found, module):
                continue
            if fuel.empty:
                break
            number = fuel.take()
            if number in fuel.skip or not _commit(rewrite, module, found, findings, number):
                refused.add(found.anchor.name)
                continue
            changed = True
        if not changed:
            break
        remove_dead_code(module)
    findings.misses = list(dict.fromkeys([*findings.misses, *(reject.miss(rewrite.name) for reject in rejects)]))
    findings.seconds = time.perf_counter() - started
    return findings


def _found(rewrite: Rewrite, module: GraphModule, inference: bool, findings: PassFindings) -> list[Match | Reject]:
    """All matches; a pattern that fails costs its own pass and nothing else."""
    try:
        with no_new_guards(module), _as_captured():
            return list(rewrite.find(module, inference))
    except Exception as error:
        findings.misses.append(
            Miss(rewrite.name, f"the pattern itself failed, {type(error).__name__}: {error}", Place())
        )
        return []


def _alive(match: Match, module: GraphModule) -> bool:
    """Whether no earlier match of this round has replaced a node that this one speaks of."""
    nodes: list[Node] = [match.anchor]
    map_arg(tuple(match.bound.values()), nodes.append)
    return all(node.graph is module.graph and not node._erased and "replaced" not in node.meta for node in nodes)


def _commit(rewrite: Rewrite, module: GraphModule, match: Match, findings: PassFindings, number: int) -> bool:
    """Replace one match. False, with the reason in the findings, where the replacement does not hold."""
    editor = Editor(module, match.anchor)
    place = place_of(match.anchor)
    try:
        replacement = _checked(rewrite, editor, match)
    except Rejected as error:
        editor.undo()
        findings.misses.append(Miss(rewrite.name, str(error), place))
        return False
    except Exception as error:  # whatever it is, the graph stays as it was and the report says so
        editor.undo()
        reason = f"{type(error).__name__}: {error}"
        findings.rolled_back.append(Change(number, match.anchor.name, rewrite.name, reason, place))
        return False
    for old, new in replacement.values.items():
        old.meta["replaced"] = True
        if new is not None:
            old.replace_all_uses_with(new)
        if new is None or has_effects(old):  # they are part of what was replaced, and would keep it alive
            module.graph.erase_node(old)
    findings.changes.append(Change(number, match.anchor.name, replacement.what, replacement.why, place))
    return True


def _checked(rewrite: Rewrite, editor: Editor, match: Match) -> Replacement:
    with no_new_guards(editor.module):
        replacement = rewrite.replace(editor, match)
    for unknown, known in replacement.equal:
        _learn(unknown, known)
    for old, new in replacement.values.items():
        if new is None and not old.users:
            continue
        if new is not None and is_size(old) and is_size(new) and same(old.meta["val"], new.meta["val"]):
            continue
        before, after = tensor_of(old), tensor_of(new) if new is not None else None
        if before is None or after is None:
            raise Rejected(f"'{old.name}' is not a tensor")
        if before.dtype != after.dtype or not same_shape(old, new):  # type: ignore[arg-type]
            raise Rejected(
                f"'{old.name}': expected {before.dtype} {list(before.shape)}, found {after.dtype} {list(after.shape)}"
            )
    return replacement


def _learn(unknown: Size, known: Size) -> None:
    """Tell the shape environment a proven fact: every shape downstream then says `known`."""
    if not same(unknown, known):
        if not free_unbacked_symbols(unknown):
            raise Rejected(f"expected a size that depends on data to be {known}, found {unknown}")
        environment, symbol = unknown.node.shape_env, unknown.node.expr  # type: ignore[union-attr]
        if symbol in environment.var_to_range:  # a bound of int64 on 5 * s0 would be rounded, and asserted not to be
            environment.var_to_range[symbol] = ValueRanges(0, int_oo)
        torch._check(unknown == known)


@contextmanager
def no_new_guards(module: GraphModule) -> Iterator[None]:
    """Refuses, when it ends, what only holds for some input sizes. A guard added after the capture would be no
    condition of the graph, and its consequence (s0 is 5) would reach every later rewrite.
    """
    environment: Any = fake_mode_of(module).shape_env
    asked: list[Any] = []

    def suppress(expr: Any, value: Any) -> None:  # called before a guard is added
        if not environment._suppress_guards_tls():
            asked.append(expr)
            suppressed.enter_context(environment.suppress_guards())

    with ExitStack() as suppressed:
        if environment is not None:
            environment._check_frozen = suppress
            suppressed.callback(delattr, environment, "_check_frozen")
        yield
    if asked:
        ShapeEnv._inner_evaluate_expr.cache_clear()  # the answers, without their guards
        raise Rejected("it holds only for some input sizes")


def _as_captured() -> Any:
    """Sizes are not 0 or 1 by accident. Not for every match: torch takes 0.1 ms to change a setting."""
    return symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


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
