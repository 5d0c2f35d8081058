"""Finds softmax(q k^T) v and silu(q k^T) v: up to queries and keys, down to the values and the merged heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.kernels.attention.plan import ADDED, CAUSAL, FILL_UNSET, MOST_FACTORS, SILU, SOFTMAX, Axis, Operand, Plan
from fxopt.normalize import switches_gradients
from fxopt.patterns.attention.merged import Groups, Merged, merged_of, readers, sizes_of
from fxopt.patterns.attention.scores import PRODUCTS, SCALINGS, Product, ordered, scores_of
from fxopt.patterns.attention.strided import Factor, Strided, strided
from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match, Reject, Search, devices
from fxopt.shape.calls import ancestors, arguments_of, closure, is_of_data, only_user
from fxopt.shape.sizes import same, same_sizes, shape_of, static, tensor_of
from fxopt.shape.spelled import spelled

aten = torch.ops.aten
_FLOATS = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.float32,)}
_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Found:
    """The operator's inputs and its plan.

    masks: of those that are there, the mask and the bias.
    weights: the softmax, where others read it too.
    """

    query: Node
    key: Node
    value: Node
    masks: tuple[Node, ...]
    plan: Plan
    groups: tuple[int, ...]  # how many batch factors are merged into each axis in front of queries and keys
    merged: Merged
    weights: Node | None


class _NotFound(Exception):
    """Why not; the text is the reason."""


def find_attention(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `found` and what it reads."""
    if switches_gradients(search.graph):
        return
    served = {device: _FLOATS[device] for device in devices(search.inference)}
    for node in search.graph.nodes:
        if node.target not in _WAYS:
            continue
        value = tensor_of(node)
        if value is None or value.device.type not in served or value.dtype not in served[value.device.type]:
            continue
        try:
            found = _WAYS[node.target](node, search.inference)
        except _NotFound as reason:
            yield Reject(str(reason), node)
            continue
        if found is None:
            continue
        read = [found.query, found.key, found.value, *found.masks]
        if found.weights is not None and node in ancestors(read):
            yield Reject("its values are computed from its weights", node)
        elif any(map(search.aliases.edited, (*read, *_between(found.merged.node, read)))):
            yield Reject("something that it reads or gives is edited in place", node)
        else:
            yield Match(found.merged.node, {"found": found, "reads": read})


def _between(result: Node, read: Sequence[Node]) -> set[Node]:
    """The result, and the tensors on its way from what is read, which are not computed any more."""
    return closure(
        [result], lambda node: [one for one in node.all_input_nodes if one not in read and tensor_of(one) is not None]
    )


def _of_softmax(node: Node, inference: bool) -> Found | None:
    rank = len(shape_of(node))
    if node.kwargs or node.args[1] not in (-1, rank - 1) or (len(node.args) > 2 and node.args[2] is not None):
        return None
    scores = scores_of(node.args[0])  # type: ignore[arg-type]
    used = _used(node)
    if scores is None or used is None:
        return None
    summed, values, out = used
    others = any(user is not summed for user in readers(node))
    return _found(scores, values, out, summed, node if others else None, inference)


def _of_gate(node: Node, inference: bool) -> Found | None:
    """silu(scores) / n, with values that it is multiplied by."""
    scores, weights, divisor = scores_of(node.args[0]), node, 1.0  # type: ignore[arg-type]
    while scores is not None and (user := only_user(weights)) is not None:
        number = constant_of(user.args[1]) if user.target in SCALINGS and user.args[0] is weights else None
        if not number or not 1e-9 < abs(number) < 1e9:  # a product of steps that fp32 would not round alike
            break
        divisor = divisor * float(number) if "div" in str(user.target) else divisor / float(number)
        weights = user
    used = _used(weights) if scores is not None else None
    if scores is None or used is None or len(weights.users) > 1:
        return None
    summed, values, out = used
    if not all(map(is_of_data, (scores.key.base, values.base))):
        return None  # two layers with silu between them
    return _found(scores, values, out, summed, None, inference, divisor)


def _of_operator(node: Node, inference: bool) -> Found | None:
    """torch's own operator."""
    query, key, value, mask, dropout, causal, scale, grouped = arguments_of(node).values()
    if dropout or grouped or not all(isinstance(side, Node) for side in (query, key, value)):
        return None
    d = static(shape_of(query)[-1])  # type: ignore[arg-type]
    if d is None:
        return None
    scores = Product(strided(query), strided(key), float(scale) if scale is not None else d**-0.5)  # type: ignore[arg-type]
    if causal:
        scores.masking, scores.fill = CAUSAL, float("-inf")
    if isinstance(mask, Node):
        is_bool = mask.meta["val"].dtype == torch.bool
        if scores.masking or not (is_bool or mask.meta["val"].dtype == node.meta["val"].dtype):
            return None
        scores.masking, scores.fill, scores.mask = (FILL_UNSET if is_bool else ADDED), float("-inf"), mask
    values = strided(value)  # type: ignore[arg-type]
    return _found(scores, values, tuple(range(len(values.axes))), node, None, inference)


_WAYS = {aten.softmax.int: _of_softmax, aten.silu.default: _of_gate, _ATTENTION: _of_operator}


def _used(softmax: Node) -> tuple[Node, Strided, tuple[int, ...]] | None:
    """(the product with the values, the values [..., S, d], the axes [..., L, d] in the product's order)"""
    for user in softmax.users if len(shape_of(softmax)) > 1 else ():
        call = spelled(user) if user.target in PRODUCTS else None
        if call is None or len(call.operands) != 2 or call.operands[0][0] is not softmax:
            continue
        (_, (*batch, L, S)), (values, right) = call.operands
        channels = [letter for letter in right if letter not in (*batch, L, S)]
        found, names = ordered(values, right, [*batch, S, *channels]), [*batch, L, *channels]
        if found is not None and len(channels) == 1 and {*call.out} == {*names} and len(call.out) == len(names):
            return user, found, tuple(names.index(letter) for letter in call.out)
    return None


def _found(
    scores: Product,
    values: Strided,
    out: tuple[int, ...],
    summed: Node,
    weights: Node | None,
    inference: bool,
    divisor: float | None = None,
) -> Found | None:
    """divisor: of silu, in place of a softmax."""
    query, key = scores.query, scores.key
    sides = query, key, values
    if len({len(side.axes) for side in sides}) > 1 or values.scale != 1:
        return None
    groups = _groups(sides)
    positions = [query.axes[-2], query.axes[-1], key.axes[-2], values.axes[-1]]
    if groups is None or any(len(axis) > 1 for side in sides for axis in side.axes[-2:]):
        raise _NotFound("its heads, rows and channels do not lie at regular distances")
    if sum(map(len, groups)) > MOST_FACTORS:
        raise _NotFound(f"more than {MOST_FACTORS} dims of rows and heads")
    added = [_mask(node, groups, positions[0], positions[2]) for node in (scores.mask, scores.bias) if node is not None]
    masks = [mask for mask in added if mask is not None]
    if len(masks) < len(added):
        raise _NotFound("its mask does not lie at regular distances")
    merged = merged_of(summed, out, groups, positions[0], positions[3])
    plan = Plan(
        query=_operand(query, groups),
        key=_operand(key, groups),
        value=_operand(values, groups),
        mask=masks[0][1] if scores.mask is not None else None,
        masking=scores.masking,
        fill=scores.fill,
        scale=scores.scale * query.scale * key.scale,
        order=merged.order,
        weights=weights is not None or not inference,
        safe=summed.target is _ATTENTION,
        weighing=SOFTMAX if divisor is None else SILU,
        divisor=1.0 if divisor is None else divisor,
        bias=masks[-1][1] if scores.bias is not None else None,
    )
    counts, read = tuple(map(len, groups)), tuple(node for node, _ in masks)
    return Found(query.base, key.base, values.base, read, plan, counts, merged, weights)


def _groups(sides: tuple[Strided, ...]) -> Groups | None:
    """The factors of each batch axis; sides that broadcast have none."""
    result = []
    for axes in zip(*(side.axes[:-2] for side in sides), strict=True):
        sizes = [tuple(factor.size for factor in axis) for axis in axes if axis]
        longest = max(sizes, key=len, default=())
        if not all(same_sizes(each, longest) for each in sizes):
            return None
        result.append(longest)
    return tuple(result)


def _operand(side: Strided, groups: Groups) -> Operand:
    axes: list[Axis] = []
    for axis, sizes in zip(side.axes, (*groups, (1,), (1,)), strict=True):
        axes += [_along(side, factor) for factor in axis] if axis else [Axis(-1, 0, 1)] * len(sizes)
    return Operand(tuple(axes), side.starts)


def _along(side: Strided, factor: Factor) -> Axis:
    size = static(factor.size)
    if factor.dim < 0:
        return Axis(-1, 0, 1 if size is None else size)
    whole = factor.step == 1 and same(factor.size, shape_of(side.base)[factor.dim])
    if size is None and not (whole and factor.dim not in dict(side.starts)):
        raise _NotFound("its rows do not lie at regular distances")
    return Axis(factor.dim, factor.step, -1 if size is None else size)


def _mask(node: Node, groups: Groups, queries: tuple, keys: tuple) -> tuple[Node, Operand] | None:
    sizes = (*groups, sizes_of(queries), sizes_of(keys))
    for mask in (strided(node), Strided.of(node)):
        missing = len(sizes) - len(mask.axes)
        if missing < 0 or mask.scale != 1 or mask.base.meta["val"].dtype != node.meta["val"].dtype:
            continue
        axes = (*((),) * missing, *mask.axes)
        if all(not axis or same_sizes(sizes_of(axis), group) for axis, group in zip(axes, sizes, strict=True)):
            return mask.base, _operand(replace(mask, axes=axes), groups)
    return None
