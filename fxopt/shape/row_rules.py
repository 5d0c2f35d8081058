"""By operator: where the rows of its result are, from where those of its arguments are. It raises where rows mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxopt.facts import facts_of
from fxopt.shape import row_products as products
from fxopt.shape.calls import is_pointwise, packet_of
from fxopt.shape.placements import Rows, Rowwise, Unknown, agreed, times_of
from fxopt.shape.sizes import expression, shape_of, static
from fxopt.shape.view_operators import through
from fxopt.shape.view_steps import Permute, Unsqueeze

aten = torch.ops.aten
Rule = Callable[[Rowwise], Rows]


def _pointwise(call: Rowwise) -> Rows:
    """Operands are aligned at their last dims. One whose rows meet another's single element would spread them."""
    aligned = []
    for source in call.node.all_input_nodes:
        if found := call.rows(source):
            aligned.append(replace(found, dim=found.dim + len(call.shape) - call.rank(source)))
    return agreed(aligned)


def _first_dims(call: Rowwise) -> Rows:
    """All that has rows has them in front. A row of the batch may be several rows of the result, behind each other."""
    found = agreed(place for place in call.placements.values() if isinstance(place, Rows))
    if found.dim != 0 or not isinstance(call.by_sizes, Rows) or call.by_sizes.dim != 0:
        raise Unknown
    return call.by_sizes


def _reshape(call: Rowwise) -> Rows:
    """The same memory order: the dims in front of the rows stay as they are."""
    source, found = call.only("self")
    before = shape_of(source)
    if list(map(expression, call.shape[: found.dim])) != list(map(expression, before[: found.dim])):
        raise Unknown
    batch = sympy.cancel(expression(before[found.dim]) / found.times)
    times = times_of(expression(call.shape[found.dim]), batch) if found.dim < len(call.shape) else None
    if not times:
        raise Unknown
    return Rows(found.dim, times)


def _same(call: Rowwise) -> Rows:
    return call.only("self")[1]


def _along(call: Rowwise) -> Rows:
    """Works along `dim`, which stays."""
    return call.beside("self", call.dims("dim", call.rank(call.only("self")[0])))


def _without(call: Rowwise) -> Rows:
    """`dim` goes, or becomes 1."""
    source, found = call.only("self")
    return _left(call, found, call.dims("dim", call.rank(source)))


def _squeezed(call: Rowwise) -> Rows:
    """Of `dim`, or of all dims, those of size 1 go. Rows, of which there may be any number, are none of them."""
    source, found = call.only("self")
    shape = shape_of(source)
    return _left(call, found, [dim for dim in call.dims("dim", len(shape)) if static(shape[dim]) == 1])


def _left(call: Rowwise, found: Rows, gone: list[int]) -> Rows:
    if found.dim in gone:
        raise Unknown
    if len(call.shape) == call.rank(call.arguments["self"]):  # type: ignore[arg-type]
        return found
    return replace(found, dim=found.dim - sum(dim < found.dim for dim in gone))


def _moved(call: Rowwise) -> Rows:
    """Dims in another order, or one more of size 1."""
    _, found = call.only("self")
    _, step = through(call.node) or (call.node, None)
    match step:
        case Permute(order):
            return replace(found, dim=order.index(found.dim))
        case Unsqueeze(dim):
            return replace(found, dim=found.dim + (dim <= found.dim))
    raise Unknown


def _expand(call: Rowwise) -> Rows:
    if not call.rows(call.arguments["self"]):
        return _made(call)
    source, found = call.only("self")
    return replace(found, dim=found.dim + len(call.shape) - call.rank(source))


def _repeated(call: Rowwise) -> Rows:
    """x.repeat(1, 3) of rows, or x.repeat(B, 1) of what all rows share."""
    found, repeats = _expand(call), call.arguments["repeats"]
    if call.rows(call.arguments["self"]) and repeats[found.dim] != 1:  # type: ignore[index]
        raise Unknown
    return found


def _repeated_one_by_one(call: Rowwise) -> Rows:
    """Each index of a dim several times, one after the other."""
    source, found = call.only("self")
    dim: Any = call.arguments["dim"]
    repeats: Any = call.arguments["repeats"]
    if dim is None or not isinstance(repeats, int):
        raise Unknown
    return replace(found, times=found.times * repeats) if dim % call.rank(source) == found.dim else found


def _cat(call: Rowwise) -> Rows:
    found = agreed(place for place in call.placements.values() if isinstance(place, Rows))
    tensors: Any = call.arguments["tensors"]
    (dim,) = call.dims("dim", len(call.shape))
    stacks = call.node.target is aten.stack.default
    if None in map(call.rows, tensors):  # a part that all rows share has as many of them as there were
        raise Unknown
    if found.dim == dim and not stacks:
        raise Unknown
    return replace(found, dim=found.dim + (stacks and dim <= found.dim))


def _looked_up(call: Rowwise) -> Rows:
    return call.only("indices")[1]


def _selected(call: Rowwise) -> Rows:
    """index_select(x, dim, index): rows of x beside `dim`, or rows of ids that take from what all share."""
    if call.rows(call.arguments["index"]):
        _, found = call.only("index")
        return replace(found, dim=call.dims("dim", len(call.shape))[0])
    return _along(call)


def _indexed(call: Rowwise) -> Rows:
    """x[:, i, j]: neighbouring indices that all rows share, beside the rows."""
    _, found = call.only("self")
    indices: Any = call.arguments["indices"]
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if found.dim in given or given[-1] - given[0] != len(given) - 1:
        raise Unknown
    if found.dim < given[0]:
        return found
    return replace(found, dim=found.dim - len(given) + max(call.rank(indices[dim]) for dim in given))


def _padded(call: Rowwise) -> Rows:
    amounts: Any = call.arguments["pad"]
    return call.beside("self", range(-len(amounts) // 2, 0))


def _one_hot(call: Rowwise) -> Rows:
    """With the number of classes given; otherwise the largest id of all rows decides."""
    classes: Any = call.arguments["num_classes"]
    if isinstance(classes, Node) or classes < 0:
        raise Unknown
    return _same(call)


def _gathered(call: Rowwise) -> Rows:
    found = agreed(place for place in call.placements.values() if isinstance(place, Rows))
    both = call.rows(call.arguments["self"]) and call.rows(call.arguments["index"])
    if not both or found.dim in call.dims("dim", len(call.shape)):
        raise Unknown
    return found


def _triangle(call: Rowwise) -> Rows:
    return call.beside("self", [-2, -1])


def _made(call: Rowwise) -> Rows:
    """zeros(B, 3): every row the same, as many as the sizes say."""
    if isinstance(call.arguments.get("fill_value"), Node) or not isinstance(call.by_sizes, Rows):
        raise Unknown
    return call.by_sizes


def _named(names: str, rule: Rule) -> dict[Any, Rule]:
    return {getattr(aten, name): rule for name in names.split()}


RULES: dict[Any, Rule] = {
    **_named("reshape view _unsafe_view flatten unflatten", _reshape),
    **_named("contiguous clone alias detach to _to_copy lift_fresh lift_fresh_copy bucketize", _same),
    **_named("softmax _softmax log_softmax _log_softmax cumsum slice narrow sort topk split split_with_sizes chunk "
             "unsafe_split unsafe_chunk", _along),
    **_named("sum mean amax amin max min var std prod logsumexp linalg_vector_norm any all argmax argmin", _without),
    **_named("select unbind", _without),
    **_named("squeeze", _squeezed),
    **_named("unsqueeze permute transpose", _moved),
    **_named("expand", _expand),
    **_named("expand_as", _pointwise),
    **_named("repeat", _repeated),
    aten.repeat_interleave.self_int: _repeated_one_by_one,
    **_named("cat stack", _cat),
    **_named("one_hot", _one_hot),
    **_named("index", _indexed),
    **_named("pad constant_pad_nd", _padded),
    **_named("linear", products.linear),
    **_named("matmul bmm mm einsum", products.by_letters),
    **_named("addmm _addmm_activation", products.addmm),
    **_named("baddbmm", products.baddbmm),
    **_named("embedding", _looked_up),
    **_named("index_select", _selected),
    **_named("gather", _gathered),
    **_named("tril triu", _triangle),
    **_named("batch_norm", products.batch_norm),
    **_named("layer_norm", products.layer_norm),
    **_named("conv1d conv2d max_pool1d max_pool2d avg_pool1d avg_pool2d", products.images),
    **_named("scaled_dot_product_attention", products.attention),
    **_named("zeros ones full empty new_zeros new_ones new_full zeros_like ones_like full_like", _made),
}  # fmt: skip
SHAPED = (_reshape, _expand, _repeated, _made)  # which may read sizes

# What operators of ours declare (fxopt/facts.py).
_DECLARED: dict[str, Rule] = {"first": _first_dims, "layers": products.chain, "axes": products.by_axes}


def rule_of(node: Node) -> Rule | None:
    """None where nothing is known of an operator."""
    found = None
    if isinstance(node.target, OpOverload):
        found = (
            RULES.get(packet_of(node)) or RULES.get(node.target) or (_pointwise if is_pointwise(node.target) else None)
        )
    return found or rule_of_ours(node)


def rule_of_ours(node: Node) -> Rule | None:
    """Of an operator or a function of ours that works row by row."""
    return _DECLARED.get(facts_of(node.target).rows) or (_first_dims if node.meta.get("rowwise") else None)
