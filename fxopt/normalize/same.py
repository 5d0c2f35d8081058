"""Operators that pass their argument on, as it is, as a view of the same form, or as a copy that nobody tells apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxopt.findings import Change
from fxopt.normalize.changes import change
from fxopt.normalize.gradients import BARRIER, is_float, modes, switches_gradients
from fxopt.shape.aliases import DROPOUTS, Aliases, is_handed_out
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of
from fxopt.shape.strides import Layout, Strides
from fxopt.shape.view_operators import EXPANSIONS, viewed

aten = torch.ops.aten

_DROPOUTS = DROPOUTS | {getattr(aten, f"{operator._schema.name[6:]}_").default for operator in DROPOUTS}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default}
_CATS = {aten.cat.default, aten.concat.default}
_BY_STRIDES = {aten.as_strided.default, aten._reshape_alias.default, aten.contiguous.default}  # not by sizes alone


def remove_identities(module: GraphModule, inference: bool) -> list[Change]:
    """Let users read what such an operator was given."""
    changes = list(_without_empty_pieces(module))
    identities = _Identities(module, inference and not switches_gradients(module.graph))
    for node in list(module.graph.nodes):
        found = identities.find(node)
        if found is None:
            continue
        source, what, why = found
        changes.append(change(node, what, why))
        identities.aliases.join(node, source)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    return changes


def _without_empty_pieces(module: GraphModule) -> Iterator[Change]:
    """`torch.cat([torch.FloatTensor(), x], 1)`: torch takes an empty tensor of one dim for nothing, whatever x is."""
    for node in module.graph.nodes:
        if node.target not in _CATS or not isinstance(node.args[0], list | tuple) or node.meta["val"].dim() == 1:
            continue
        kept = [piece for piece in node.args[0] if not _is_nothing(tensor_of(piece))]
        if 0 < len(kept) < len(node.args[0]) and _promoted(kept) == node.meta["val"].dtype:
            node.args = (kept, *node.args[1:])
            yield change(node, "empty piece of a cat", "it adds nothing")


def _promoted(pieces: Sequence[Node]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (piece.meta["val"].dtype for piece in pieces))


def _is_nothing(value: torch.Tensor | None) -> bool:
    return value is not None and value.dim() == 1 and static(value.shape[0]) == 0


Identity = tuple[Node, str, str]  # what is passed on; what goes, and why


class _Identities:
    def __init__(self, module: GraphModule, inference: bool) -> None:
        self.aliases = Aliases(module.graph)
        self.inference = inference
        self.reshapes_in_place = any(map(_reshapes_in_place, module.graph.nodes))  # the one object, but not the other
        self._graph = module.graph
        self._recorded = {} if inference or not switches_gradients(module.graph) else modes(module.graph)

    @functools.cached_property
    def strides(self) -> Strides:
        return Strides(self._graph)  # of no use to most models

    def find(self, node: Node) -> Identity | None:
        if not isinstance(node.target, OpOverload) or not node.args:
            return None
        return self._itself(node) or (self._view(node) or self._copy(node) if self._is_on_the_way(node) else None)

    def _is_on_the_way(self, node: Node) -> bool:
        """Whether gradients go through it: what forward makes while it has them off ends them, and is a leaf."""
        return self._recorded.get(node, True) or not is_float(node)

    def _itself(self, node: Node) -> Identity | None:
        """Eager returns the argument itself, so its users may even edit it."""
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        if node.target in _DROPOUTS:
            _, p, training = node.args
            return (source, "dropout", "eval" if not training else "p = 0") if training is False or p == 0 else None
        if is_plain_cast(node):
            return source, "cast", "the tensor has this dtype already"
        if node.target is aten.contiguous.default and len(node.args) == 1 and not node.kwargs:
            contiguous = self.strides.known(source) is Layout.CONTIGUOUS
            return (source, "contiguous", "the tensor is contiguous already") if contiguous else None
        if node.target is aten.flatten.using_ints and tensor_of(source) is not None:
            return (source, "flatten", "of one dim") if _flattens_one(node, len(shape_of(source))) else None
        return None

    def _view(self, node: Node) -> Identity | None:
        """A view of the same sizes and strides; it stays where someone could tell two tensor objects apart."""
        source = node.args[0]
        if not isinstance(source, Node) or not _is_view(node) or is_handed_out(node):
            return None
        if self.aliases.edited(node) and not self._is_edited_freely(node):
            return None
        if node.target is aten.detach.default:
            off = self.inference and not self.aliases.leaves(node)  # what requires a gradient, the caller sees
            return (source, "detach", "gradients are off") if off else None
        return (source, "view", "of the same shape") if _same_form(node, source) else None

    def _is_edited_freely(self, node: Node) -> bool:
        """Whether an edit is the same of one view as of two: torch may refuse that, or gradients go past the edit."""
        return self.aliases.owned(node) and not (self._recorded or self.reshapes_in_place)

    def _copy(self, node: Node) -> Identity | None:
        """A copy whose original nobody edits afterwards, and that neither is edited nor leaves the model."""
        source, what = _copied(node)
        if source is None or self.aliases.edited(node) or self.aliases.leaves(node):
            return None
        if self.aliases.edited_after(source, node) or not (self.inference or self.aliases.owned(source)):
            return None
        if not _same_kind(source, node) or not _same_sizes(node, source) or not self.strides.may_become(node, source):
            return None
        return source, what, "nothing edits the copy or the original"


def _flattens_one(flatten: Node, rank: int) -> bool:
    start, end = (arguments_of(flatten)[name] for name in ("start_dim", "end_dim"))
    return rank > 0 and start % rank == end % rank  # type: ignore[operator]


def is_plain_cast(node: Node) -> bool:
    """A cast that returns its argument itself."""
    if node.target not in _CASTS or tensor_of(node) is None:
        return False
    return not _copies(node) and _same_kind(node.args[0], node)


def _same_kind(left: Any, right: Node) -> bool:
    before, after = tensor_of(left), tensor_of(right)
    if before is None or after is None:
        return False
    return (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)


def _copies(node: Node) -> bool:
    values = arguments_of(node)
    return bool(values.get("copy")) or values.get("memory_format") not in (None, torch.preserve_format)


def _is_view(node: Node) -> bool:
    """One tensor, declared a view of the first argument, by sizes and not by strides."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    if schema.is_mutable or len(schema.returns) != 1 or node.target in _CASTS | _BY_STRIDES:
        return False
    return schema.returns[0].alias_info is not None and schema.arguments[0].alias_info is not None


def _reshapes_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


def _same_sizes(node: Node, source: Node) -> bool:
    """Equal dtype and sizes, for every input."""
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dtype != after.dtype or before.is_conj() != after.is_conj():
        return False
    return before.is_neg() == after.is_neg() and same_shape(source, node)


def _same_form(node: Node, source: Node) -> bool:
    """Equal dtype and sizes, and the same element at each place, for every input."""
    if not _same_sizes(node, source):
        return False
    found = viewed(node, EXPANSIONS)  # not by strides, which a rewrite may have changed
    return node.target is BARRIER or (found is not None and found[1].is_reshape(shape_of(source)))


def _copied(node: Node) -> tuple[Node | None, str]:
    """What `node` is a copy of, as far as its arguments tell (sizes are compared elsewhere)."""
    source: Any = node.args[0]
    if node.target is aten.clone.default:
        return source, "clone"
    if node.target in _CASTS and isinstance(source, Node):
        return source, "copy"
    if node.target in (aten.repeat.default, aten.tile.default):
        return source, "repeat"
    if node.target in _CATS and isinstance(source, list | tuple) and len(source) == 1:
        return source[0], "cat of one"
    return None, ""
