"""One spelling for each operation, shared by models and patterns: what carries no computation goes first."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxopt.shape.aliases import DROPOUTS, Aliases, has_effects, is_pure
from fxopt.shape.sizes import tensor_of

aten = torch.ops.aten

_KEPT = ("placeholder", "output", "call_module")
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default}


def normalize(module: GraphModule) -> None:
    """Rewrite `module`'s graph in place: same values, same order of effects, fewer spellings."""
    remove_dead_code(module)
    _fold_literals(module)
    aliases = Aliases(module.graph)
    for node in list(module.graph.nodes):
        same = _same_as(node, aliases)
        if same is not None:
            node.replace_all_uses_with(same)
            module.graph.erase_node(node)
    if not switches_gradients(module.graph):  # twins on both sides of a no_grad differ
        _merge_twins(module, Aliases(module.graph))
    remove_dead_code(module)


def remove_dead_code(module: GraphModule) -> None:
    """Drop what no output needs; in-place edits and opaque submodules stay."""
    module.graph.eliminate_dead_code(lambda node: node.op in _KEPT or has_effects(node))


def switches_gradients(graph: Graph) -> bool:
    """Whether forward turns gradients on or off on its way."""
    return any(node.target is torch._C._set_grad_enabled for node in graph.nodes)


def _fold_literals(module: GraphModule) -> None:
    """torch.tensor(...) in forward is traced as copies of a constant; nobody else holds it, so read it directly."""
    literals: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        constant = _literal_behind(node, literals)
        if constant is None:
            continue
        literals[node] = constant
        if node.target is aten.detach_.default:  # a constant has no gradient to detach from
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            del literals[node]
    aliases = Aliases(module.graph)
    for node, constant in literals.items():
        if not aliases.edited(node):
            constant.meta["literal"] = True
            node.replace_all_uses_with(constant)
    remove_dead_code(module)


def _literal_behind(node: Node, literals: dict[Node, Node]) -> Node | None:
    """The constant that `node` is a fresh copy of."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.lift_fresh_copy.default:
        return source if source.op == "get_attr" else None
    if source not in literals or node.target not in (*_CASTS, aten.detach_.default, aten.detach.default):
        return None
    return literals[source] if _same_kind(source, node) else None


def _same_kind(left: Node, right: Node) -> bool:
    before, after = left.meta["val"], right.meta["val"]
    return (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)


def _same_as(node: Node, aliases: Aliases) -> Node | None:
    """The argument that `node` merely passes on, if it does."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or aliases.edited(node):
        return None
    if node.target in DROPOUTS:
        return source if node.args[2] is False else None
    if node.target is aten.slice.Tensor and _is_whole(node) and all(user.op != "output" for user in node.users):
        return source
    if node.target in _CASTS and tensor_of(source) is not None and not _copies(node):
        return source if _same_kind(source, node) else None
    return None


def _is_whole(node: Node) -> bool:
    """x[:], as the leading dims of x[:, i] are traced."""
    arguments: tuple[Any, ...] = (*node.args[2:], *(None, None, 1)[len(node.args) - 2 :])
    start, stop, step = arguments
    return start in (None, 0) and (stop is None or (isinstance(stop, int) and stop >= 2**62)) and step == 1


def _copies(node: Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bool(values.get("copy")) or values.get("memory_format") not in (None, torch.preserve_format)


def _merge_twins(module: GraphModule, aliases: Aliases) -> None:
    """Common subexpressions: the slice and cast that a model writes 52 times."""
    seen: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if not is_pure(node) or aliases.edited(node):
            continue
        key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
        twin = seen.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            module.graph.erase_node(node)


def _frozen(value: Any) -> Any:
    """A hashable stand-in; numbers keep their type, since 1, 1.0 and True mean different things to torch."""
    if isinstance(value, list | tuple):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)
