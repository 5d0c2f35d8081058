"""Pointwise operators write over an argument that nothing else reads: memory that is warm, and not asked of the system.

From a few MB on every new tensor is new pages: linear and relu_ instead of linear and relu on two threads take 0.7 ms
instead of 3.4 at [4096, 256], 0.7 instead of 3.1 at [1024, 1024], and below 1 MB the same within 5%. Only without
gradients, which would need the argument.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxopt.facts import facts_of
from fxopt.normalize.functional import functional_overload
from fxopt.shape.aliases import Aliases, is_random
from fxopt.shape.calls import is_pointwise
from fxopt.shape.sizes import same, tensor_of
from fxopt.shape.strides import Layout, Strides
from fxopt.shape.view_operators import EXPANSIONS

aten = torch.ops.aten
_MAKES_CONTIGUOUS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.mvlgamma.default}


def reuse_memory(graph: Graph) -> int:
    """Turn `op(x, ...)` into `op_(x, ...)` where x is dead afterwards. Returns how often."""
    aliases, strides = Aliases(graph), Strides(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    reused = 0
    for node in graph.nodes:
        edit = in_place_overload(node.target) if isinstance(node.target, OpOverload) else None
        if edit is None or "bound" in node.meta or aliases.leaves(node) or not _dies(node, aliases, place):
            continue
        if node.target in _MAKES_CONTIGUOUS and not _stays_contiguous(node, strides):
            continue
        node.target = edit
        aliases.join(node, node.args[0])  # type: ignore[arg-type]
        reused += 1
    return reused


@functools.cache
def in_place_overload(target: OpOverload) -> OpOverload | None:
    """The operator that writes what the pointwise `target` returns into its first argument."""
    if not is_pointwise(target) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return next((edit for edit in overloads if functional_overload(edit) is target), None)


def _dies(node: Node, aliases: Aliases, place: dict[Node, int]) -> bool:
    """Whether the first argument is memory of this call alone, of the result's form, that `node` reads last."""
    source = node.args[0]
    if not isinstance(source, Node) or is_random(node) or not _same_form(source, node):
        return False
    sharing = aliases.sharing(source)
    read_again = any(other is not source and other in sharing for other in node.all_input_nodes)
    # A reshape of what was expanded may be a view, whose elements share memory, also where a fake copies.
    if read_again or not all(map(_makes_memory, sharing)) or any(each.target in EXPANSIONS for each in sharing):
        return False
    return all(place[user] <= place[node] for member in sharing for user in member.users)


def _stays_contiguous(node: Node, strides: Strides) -> bool:
    """Whether its result may have the strides of its argument: fake ones are not those of every operator."""
    known = strides.known(node.args[0])  # type: ignore[arg-type]
    return known is Layout.CONTIGUOUS or strides.asked(node) is Layout.ANY


def _makes_memory(node: Node) -> bool:
    """Not an input, a parameter or a constant, nor what an operator of ours may keep from call to call."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace == "aten" or facts_of(node.target).overwritable


def _same_form(source: Node, node: Node) -> bool:
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dtype != after.dtype or before.ndim != after.ndim:
        return False
    sizes = zip((*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True)
    return all(same(left, right) for left, right in sizes)
