"""What kind of work each node of a graph is.

A node inherits its kind from what it computes with, in graph order; views and casts that only prepare something are
then given to what they prepare.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from fxopt.facts import facts_of
from fxopt.shape.aliases import is_view
from fxopt.shape.sizes import tensors_in

COLUMNS = "embedding columns"
INDEX = "index preparation"
MLP = "linear layers"
INTERACTION = "interaction"
OPAQUE = "opaque submodules"
OTHER = "other"
KINDS = (COLUMNS, INDEX, MLP, INTERACTION, OPAQUE, OTHER)

_LOOKUPS = {"embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}
_GATHERS = {"index_select", "index", "gather"}  # lookups where what they read is a table
_DENSE = {"linear", "addmm", "mm", "addbmm", "baddbmm", "conv1d", "conv2d", "convolution"}
_PRODUCTS = {"bmm", "matmul", "einsum", "outer", "dot", "softmax", "_softmax", "scaled_dot_product_attention"}
_ACTIVATIONS = {"relu", "gelu", "silu", "prelu", "leaky_relu", "elu", "sigmoid", "tanh"}
_LAYERS = _ACTIVATIONS | {"batch_norm", "layer_norm", "dropout"}
_COLLECTORS = {"cat", "concat", "stack"}
_REDUCTIONS = {"sum", "mean", "max", "amax", "min", "amin", "norm", "linalg_vector_norm"}
_CASTS = {"to", "_to_copy", "clone", "contiguous", "type_as"}


def is_operator(node: Node) -> bool:
    """A call that computes tensors: what eager launches. Sizes and list items are not."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(tensors_in(node))


def runs(node: Node) -> bool:
    """A call that takes time: an operator, a function that stands for some, an opaque submodule."""
    if node.op == "call_module" or is_operator(node):
        return True
    return node.op == "call_function" and node.target is not operator.getitem and bool(tensors_in(node))


def is_lookup(node: Node) -> bool:
    """Whether it reads rows of a table, or of many in one call."""
    name = name_of(node)
    looks_up = name in _LOOKUPS or facts_of(node.target).looks_up
    return looks_up or (name in _GATHERS and _is_state(node.args[0]))


def kinds(graph: Graph) -> dict[Node, str]:
    """The kind of each node of `graph` (values in meta["val"], meta["state"] on parameters)."""
    found: dict[Node, str] = {}
    for node in graph.nodes:
        found[node] = _kind(node, found)
    for node in reversed(graph.nodes):
        found[node] = _given_to_users(node, found)
    return found


def kinds_after(graph: Graph, captured: Mapping[str, str], work: Mapping[str, float]) -> dict[Node, str]:
    """The kind of each node of a rewritten graph: that of most of the work that it replaced.

    Args:
        captured: the kind of each node of the captured graph, by name; work: how much it is.
    """
    found: dict[Node, str] = {}
    for node in graph.nodes:
        found[node] = captured.get(node.name) or _by_origins(node, captured, work) or _kind(node, found)
        if "inner" in node.meta:
            found |= kinds_after(node.meta["inner"], captured, work)
    return found


def _by_origins(node: Node, captured: Mapping[str, str], work: Mapping[str, float]) -> str:
    """A call for lookups and the arithmetic on their ids is one of columns, whatever was more work."""
    if is_lookup(node):
        return COLUMNS
    done = defaultdict[str, float](float)
    for name in node.meta.get("origins", ()):
        done[captured.get(name, OTHER)] += work.get(name, 0.0)
    for minor in (OTHER, INDEX):
        if len(done) > 1:
            done.pop(minor, None)
    return max(done, key=done.__getitem__, default="")


def _kind(node: Node, found: dict[Node, str]) -> str:
    name, computed = name_of(node), {found[n] for n in node.all_input_nodes}
    if node.op == "call_module":
        return OPAQUE
    if node.op in ("placeholder", "get_attr", "output"):
        return OTHER
    if is_lookup(node):
        return COLUMNS
    if is_integer(node):
        return INDEX
    if name in _DENSE or (name in _PRODUCTS and any(map(_is_state, node.all_input_nodes))):
        return MLP
    if name in _PRODUCTS or _multiplies(node, found):
        return INTERACTION
    if name in _LAYERS and COLUMNS in computed:
        return MLP
    order = (INTERACTION, COLUMNS, MLP) if name in _COLLECTORS else (INTERACTION, MLP, COLUMNS, OPAQUE)
    return next((kind for kind in order if kind in computed), OTHER)


def _given_to_users(node: Node, found: dict[Node, str]) -> str:
    """A view, a cast or a weight's transpose belongs to what alone uses it; so does a sum of columns to its square."""
    kind, users = found[node], {found[user] for user in node.users if user.op != "output"}
    prepares = kind == OTHER and (is_view(node) or name_of(node) in _CASTS)
    reduces = kind == COLUMNS and name_of(node) in _REDUCTIONS and users == {INTERACTION}
    if len(users) != 1 or not (prepares or reduces):
        return kind
    return INDEX if prepares and users == {COLUMNS} else next(iter(users))


def _multiplies(node: Node, found: dict[Node, str]) -> bool:
    """A product of two computed values, or a square: not a mask, a weight, or an activation of an MLP's own output."""
    name = name_of(node)
    factors = [found.get(n, OTHER) for n in node.args[:2] if isinstance(n, Node) and not _is_state(n)]
    if name in ("pow", "square"):
        return found.get(node.args[0], OTHER) in (COLUMNS, INTERACTION)  # type: ignore[arg-type]
    values = [kind for kind in factors if kind in (COLUMNS, MLP, INTERACTION)]
    return name == "mul" and len(values) == 2 and values != [MLP, MLP]


def name_of(node: Node) -> str:
    """The same for relu.default and relu_.default; "" where it is no call of an operator."""
    target = node.target
    return target.overloadpacket.__name__.rstrip("_") if isinstance(target, torch._ops.OpOverload) else ""


def is_integer(node: Node) -> bool:
    tensors = tensors_in(node)
    return bool(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)


def _is_state(node: object) -> bool:
    """A parameter, or a view of one."""
    while isinstance(node, Node) and is_view(node):
        node = node.all_input_nodes[0]
    return isinstance(node, Node) and "state" in node.meta
