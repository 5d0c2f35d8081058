"""What a model returns is the caller's to edit: no result is memory that backward needs, unless eager's is.

`logits.mul_(0.5)` ahead of the loss is an error where backward needs the logits; through `.data` it changes gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt.facts import facts_of
from fxopt.rewrites.framework.editor import Editor, as_captured, decomposed, fake_mode_of, no_new_guards
from fxopt.rewrites.framework.gradient_paths import GradientPaths, may_ask_later
from fxopt.rewrites.framework.sources import results_of
from fxopt.shape.aliases import Aliases, has_effects, is_random
from fxopt.shape.sizes import tensor_of
from fxopt.torch_internals.storage import shares_storage

aten = torch.ops.aten


def part_from_backward(module: GraphModule, captured: GraphModule) -> None:
    """Copy what is returned and kept for backward, where nothing keeps what was captured.

    Who keeps a result keeps a copy: the result itself is what later ones are computed from, and have their gradients
    in. Where the call that makes it keeps it, everyone else has the copy. Parameters are never copied. What is kept
    depends on which inputs ask for gradients: those of the capture, or all of them.
    """
    found: Found = {}
    _part(module, captured, True, found)
    if may_ask_later(captured.graph):
        _part(module, captured, False, found)


def _part(module: GraphModule, captured: GraphModule, surely: bool, found: Found) -> None:
    now, before = Kept(module, surely, found), Kept(captured, surely, found)
    readers, makers = dict[Node, set[Node]](), dict[Node, set[Node]]()
    for result, was in zip(results_of(module), results_of(captured), strict=True):
        if not isinstance(result, Node) or not isinstance(was, Node) or now.edited(result):
            continue
        made, *views = now.path(result)
        if any(map(is_random, views)):  # a dropout, which may be a view
            continue
        if "state" in made.meta or not (keepers := now.keepers(result)) or before.surely_kept(was):
            continue
        memory = now.sharing(result)
        apart = set(keepers).difference(memory)
        readers |= {read: users for read in memory if (users := apart.intersection(read.users))}
        if made.op == "call_function" and len(apart) < len(keepers):
            makers[made] = set(made.users)
    copies = {made: _read_a_copy(module, made, users) for made, users in makers.items()}
    for read, users in readers.items():
        _read_a_copy(module, copies.get(read, read), users)


def _read_a_copy(module: GraphModule, read: Node, users: set[Node]) -> Node:
    behind = read.next
    while behind.op == "placeholder":
        behind = behind.next
    copy = Editor(module, behind).call(aten.clone.default, read)
    read.replace_all_uses_with(copy, lambda user: user in users)
    return copy


def _lie_together(left: Node, right: Node) -> bool:
    """Whether both surely share memory; of a reshape, its schema says only that it may."""
    one, other = tensor_of(left), tensor_of(right)
    return one is not None and other is not None and shares_storage(one, other)


# By a call, what it reads, and which of that has gradients: what its backward needs of what it reads and gives.
Found = dict[tuple[Node, tuple[tuple[Node, bool], ...]], set[Node] | None]


class Kept:
    """Which memory backward needs: what an operator keeps is found by recording its backward on fake tensors."""

    def __init__(self, module: GraphModule, surely: bool, found: Found | None = None) -> None:
        self._module = module
        self._aliases = Aliases(module.graph)
        self._paths = GradientPaths(module.graph, surely)
        self._found: Found = {} if found is None else found
        self.edited = self._aliases.edited
        self.sharing = self._aliases.sharing

    def path(self, result: Node) -> list[Node]:
        """From the tensor that was made to the view of it that is the result."""
        sharing, path = set(self._aliases.sharing(result)), [result]
        while source := next((node for node in path[0].all_input_nodes if node in sharing), None):
            path.insert(0, source)
        while len(path) > 1 and tensor_of(path[0]) is None:  # a call with several results, which share no memory
            path.pop(0)
        return path

    def keepers(self, result: Node) -> list[Node]:
        """The calls whose backward may need the memory of `result`."""
        own = self._own(result)
        return [call for call in self._calls(own) if self._keeps(call, set(own), unknown=True)]

    def surely_kept(self, result: Node) -> bool:
        """Whether backward needs the very tensor, and what needs it counts for a result."""
        alike = [node for node in self._own(result) if tensor_of(node) is None or _lie_together(node, result)]
        return any(call in self._live and self._keeps(call, set(alike), unknown=False) for call in self._calls(alike))

    def _own(self, result: Node) -> list[Node]:
        """What may share memory with `result`, less the other results of a call of several, which share none."""
        made = self.path(result)[0]
        others = set(made.all_input_nodes[0].users) - {made} if made.target is operator.getitem else set()
        return [node for node in self.sharing(result) if node not in others]

    def _calls(self, sharing: list[Node]) -> list[Node]:
        calls = dict.fromkeys(call for node in sharing for call in (node, *node.users) if call.op == "call_function")
        return [call for call in calls if self._paths.reach(call)]

    @functools.cached_property
    def _live(self) -> set[Node]:
        """What gradients of results come back to: not what only a comparison or detach() has read."""
        live = set[Node]()
        for node in reversed(self._module.graph.nodes):
            passing = (user.op == "output" or self._paths.reach(user) for user in node.users if user in live)
            if node.op == "output" or any(passing):
                live.add(node)
        return live

    def _keeps(self, call: Node, sharing: set[Node], unknown: bool) -> bool:
        if is_random(call) or has_effects(call):  # not to be run once more
            return False
        needs_result = facts_of(call.target).needs_result
        if call in sharing and needs_result is not None and needs_result(call.args[-1]):  # type: ignore[arg-type]
            return True
        kept = self._kept_by(call)
        return unknown if kept is None else not sharing.isdisjoint(kept)

    def _kept_by(self, call: Node) -> set[Node] | None:
        """What backward of a call needs of what it reads and gives; None where that cannot be found out."""
        key = call, tuple((node, self._paths.reach(node)) for node in call.all_input_nodes)
        if key not in self._found:
            self._found[key] = self._record(call)
        return self._found[key]

    def _record(self, call: Node) -> set[Node] | None:
        read = {node: self._recorded(node) for node in call.all_input_nodes}
        kept: list[Tensor] = []
        hooks = saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)  # type: ignore[func-returns-value]
        try:
            with self._as_captured(), torch.enable_grad(), hooks:
                value = call.target(*map_arg(call.args, read.get), **map_arg(call.kwargs, read.get))  # type: ignore[operator]
        except Exception:
            return None
        given = {node: value[node.args[1]] for node in call.users if node.target is operator.getitem} or {call: value}
        shown = {node: tensor for node, tensor in (read | given).items() if isinstance(tensor, Tensor)}
        return {node for node, tensor in shown.items() if any(shares_storage(one, tensor) for one in kept)}

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        with no_new_guards(self._module), fake_mode_of(self._module), as_captured(), decomposed():
            yield

    def _recorded(self, node: Node) -> Any:
        value = node.meta.get("val")
        return value.detach().requires_grad_(self._paths.reach(node)) if isinstance(value, Tensor) else value
