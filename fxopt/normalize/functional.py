"""In-place edits as functional operators: `x.op_(args)` becomes `y = op(x, args)`, and later uses of x read y.

The same values where the graph made x's memory itself and nothing else that shares it is read after the edit. What
does not qualify stays an edit, and a barrier to every rewrite. (The idea is torch's functionalization; this one needs
no retracing and leaves what is cheaper in place, such as a write to a slice.)
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt.findings import Change
from fxopt.normalize.changes import change
from fxopt.normalize.gradients import gradient_switches
from fxopt.normalize.keys import form, frozen
from fxopt.shape.aliases import Aliases, is_random, mutates, views_behind, written_arguments
from fxopt.shape.sizes import same, tensor_of
from fxopt.shape.strides import same_stride
from fxopt.shape.view_operators import is_piece
from fxopt.torch_internals.fake_tensors import DATA_DEPENDENT, mode_of, without_guards

aten = torch.ops.aten


def make_functional(module: GraphModule, inference: bool) -> list[Change]:
    """Replace the edits of `module`'s graph that provably can be. `inference`: forward runs with gradients off."""
    if not any(map(mutates, module.graph.nodes)):
        return []
    return _Functional(module.graph, inference).run()


class _Functional:
    """One walk in graph order. A functional result is memory of its own, so one edit replaced frees the next."""

    def __init__(self, graph: Graph, inference: bool) -> None:
        self.graph = graph
        self.aliases = Aliases()
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.last_use = {node: max(map(self.places.__getitem__, node.users), default=-1) for node in graph.nodes}
        self.values = _Values()
        self.switches = gradient_switches(graph)
        self.history = not inference or any(self.switches.values())

    def run(self) -> list[Change]:
        changes, recorded = [], True
        for node in list(self.graph.nodes):
            recorded = self.switches.get(node, recorded)
            if not mutates(node) or is_random(node) or node.op == "call_module":
                self.aliases.add(node)
            elif self._is_dead(node):
                changes.append(change(node, f"in-place {_name(node)}", "nothing reads the memory it edits"))
                self.graph.erase_node(node)
            elif (new := self._functional(node, recorded)) is not None:
                changes.append(change(node, f"in-place {_name(node)}", "nothing else reads the memory it edits"))
                self._replace(node, new)
            else:
                self.aliases.add(node)
        return changes

    def _is_dead(self, edit: Node) -> bool:
        place = self.places[edit]
        return not edit.users and all(
            self._is_private(node, place) and self.last_use[node] <= place for node in written_arguments(edit)
        )

    def _functional(self, edit: Node, recorded: bool) -> Node | None:
        """The functional operator, inserted before the edit; None where the edit has to stay."""
        operator = functional_overload(edit.target)
        source = edit.args[0] if edit.args else None
        if self.history and not self._keeps_history(edit, recorded):
            return None
        if operator is None or not isinstance(source, Node) or not self._is_private(source, self.places[edit]):
            return None
        if self._may_be_refused(edit, source):
            return None
        value = self.values.of(operator, edit)
        if value is None:
            return None
        with self.graph.inserting_before(edit):
            new = self.graph.call_function(operator, edit.args, edit.kwargs)
        new.meta = {**edit.meta, "val": value, "views": []}
        return new

    def _may_be_refused(self, edit: Node, source: Node) -> bool:
        """Whether torch may refuse it: of what it also reads through another view, and of one of several views."""
        return self.aliases.overlaps(edit) or (self.history and any(map(is_piece, views_behind(source))))

    @staticmethod
    def _keeps_history(edit: Node, recorded: bool) -> bool:
        """Whether gradients go the same way. Under no_grad an edit leaves no trace; aten::copy has no derivative."""
        return edit.target is aten.detach_.default or (recorded and edit.target is not aten.copy_.default)

    def _is_private(self, source: Node, place: int) -> bool:
        """Whether no one else can tell if the memory of `source` is edited at `place`."""
        others = (node for node in self.aliases.sharing(source) if node is not source)
        return self.aliases.owned(source) and all(self.last_use[other] <= place for other in others)

    def _replace(self, edit: Node, new: Node) -> None:
        source, place = edit.args[0], self.places[edit]
        assert isinstance(source, Node)
        self.places[new], self.last_use[new] = place, max(self.last_use[source], self.last_use[edit])
        self.last_use[source] = place
        self.aliases.add(new)
        edit.replace_all_uses_with(new)
        source.replace_all_uses_with(new, delete_user_cb=lambda user: self.places[user] > place)
        self.graph.erase_node(edit)


@functools.cache
def functional_overload(target: Any) -> OpOverload | None:
    """The operator that returns what `target` writes into its first argument: of the same arguments, none written."""
    schema = target._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    namespace, name = schema.name.split("::")
    if not written[0] or any(written[1:]) or not name.endswith("_") or len(schema.returns) != 1:
        return None
    result = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")  # __ixor__: __xor__
    packet = getattr(getattr(torch.ops, namespace), result, None)
    for overload in packet.overloads() if packet is not None else ():
        operator = getattr(packet, overload)
        if not operator._schema.is_mutable and _signature(operator) == _signature(target):
            return operator
    return None


def _signature(operator: OpOverload) -> list[tuple]:
    arguments = operator._schema.arguments
    returns = [str(result.type) for result in operator._schema.returns]
    return [(a.name, str(a.type), a.kwarg_only, a.default_value) for a in arguments] + [("", *returns)]


class _Values:
    """Fake results of functional operators, worked out once for arguments of the same sizes, strides and dtypes."""

    def __init__(self) -> None:
        self._fits: dict[Any, bool] = {}

    def of(self, operator: OpOverload, edit: Node) -> torch.Tensor | None:
        """None where dtype, sizes or strides are not those of the edited tensor."""
        before = tensor_of(edit)
        if before is None:
            return None
        key = operator, frozen(map_arg((edit.args, edit.kwargs), lambda node: form(node.meta["val"])))
        mode = mode_of(before)
        with mode or nullcontext():
            if key not in self._fits:
                self._fits[key] = _fits(operator, edit, before, mode)
            if not self._fits[key]:
                return None
            return torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device=before.device)


def _fits(operator: OpOverload, edit: Node, before: torch.Tensor, mode: Any) -> bool:
    args, kwargs = map_arg((edit.args, edit.kwargs), lambda node: node.meta["val"])
    try:
        with without_guards(mode):
            after = operator(*args, **kwargs)
    except DATA_DEPENDENT:  # `copy` asks more about sizes than `copy_`, up to torch 2.12
        return False
    if before.dtype != after.dtype or before.ndim != after.ndim or not _is_dense(before):
        return False
    return all(map(same, before.shape, after.shape)) and all(map(same_stride, before.stride(), after.stride()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the axes in some order are those of contiguous memory: operators keep no other strides."""
    axes, expected = list(zip(tensor.shape, tensor.stride(), strict=True)), 1
    while axes:
        axis = next((axis for axis in axes if same_stride(axis[1], expected) or same(axis[0], 1)), None)
        if axis is None:
            return False
        axes = [other for other in axes if other is not axis]
        expected = expected * axis[0]
    return True


def _name(edit: Node) -> str:
    assert isinstance(edit.target, OpOverload)
    return edit.target._schema.name.split("::")[1]
