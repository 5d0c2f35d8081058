"""Masks that hold everywhere, or nowhere: substitutions that never happen, masks of masks, multiplications by 1."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Reject
from fxopt.patterns.dead_checks.proofs import Checks, Dead, Handler, Verdict, either_side, is_integer, tested_by, told
from fxopt.shape.calls import FILLS, WHERES, arguments_of

aten = torch.ops.aten


def _where(checks: Checks, node: Node) -> Verdict:
    arguments = arguments_of(node)
    mask, first, second = (arguments[name] for name in ("condition", "self", "other"))
    assert isinstance(mask, Node)
    what = f"where({told(mask)}, {told(first)}, {told(second)})"
    return _decided(checks, node, mask, what, {True: ("self", second), False: ("other", first)})


def _masked_fill(checks: Checks, node: Node) -> Verdict:
    arguments = arguments_of(node)
    mask, value = arguments["mask"], arguments["value"]
    assert isinstance(mask, Node)
    what = f"masked_fill({told(mask)}, {told(value)})"
    return _decided(checks, node, mask, what, {False: ("self", value)})


def _decided(checks: Checks, node: Node, mask: Node, what: str, ways: dict[bool, tuple[str, object]]) -> Verdict:
    """ways: by what the mask always is, the argument that the node gives then, and what is dropped."""
    always = checks.ranges.condition(mask)
    if always is None:
        return _stays(checks, node, mask, what)
    if always not in ways:
        return None
    name, dropped = ways[always]
    plain = constant_of(dropped) is not None  # the gradient of the other branch would be zeros, not none
    return checks.pass_on(node, name, checks.proof_of(mask, always), what, float_gradient=plain)


def _stays(checks: Checks, node: Node, mask: Node, what: str) -> Reject | None:
    """Why a substitution in ids is needed."""
    tested = tested_by(mask)
    if tested is None or not is_integer(tested) or not is_integer(node):
        return None
    return Reject(f"{what} stays: {checks.proof(tested)}", node)


def _neutral(keeping: bool) -> Handler:
    """mask and True, mask or False."""

    @either_side
    def handle(checks: Checks, node: Node, kept: str, mask: object) -> Dead | None:
        if node.meta["val"].dtype != torch.bool or checks.ranges.condition(node) is not None:
            return None  # what is constant itself goes with those who read it
        if not isinstance(mask, Node) or checks.ranges.condition(mask) is not keeping:
            return None
        what = f"{'and' if keeping else 'or'} {told(mask)}"
        return checks.pass_on(node, kept, checks.proof_of(mask, keeping), what)

    return handle


@either_side
def _times_one(checks: Checks, node: Node, kept: str, mask: object) -> Dead | None:
    """rows * (ids >= 0).float(): exact where the mask is 1 everywhere."""
    if not isinstance(mask, Node) or mask.op != "call_function" or checks.constant(mask) != 1:
        return None
    if node.meta["val"].is_complex():
        return None
    why = f"the mask is 1 everywhere: {checks.ranges.of(mask).because}"
    return checks.pass_on(node, kept, why, "multiplication by a mask", float_gradient=True)


HANDLERS: dict[object, Handler] = {
    **dict.fromkeys(WHERES, _where),
    **dict.fromkeys(FILLS, _masked_fill),
    aten.logical_and.default: _neutral(True),
    aten.logical_or.default: _neutral(False),
    aten.mul.Tensor: _times_one,
}
REPAIRS = (*(target for target in HANDLERS if target not in (aten.logical_and.default, aten.logical_or.default)),)
BITWISE: dict[object, Handler] = {
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.__and__.Tensor), _neutral(True)),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.__or__.Tensor), _neutral(False)),
}
