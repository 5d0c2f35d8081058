"""Asserts that always hold: what tracing, export and careful authors leave in a graph."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.patterns.core import Reject
from fxopt.patterns.dead_checks.proofs import Checks, Dead, Handler, Verdict
from fxopt.shape.calls import arguments_of
from fxopt.shape.conditions import follows, require
from fxopt.shape.sizes import tensor_of
from fxopt.torch_internals.symbols import free_unbacked_symbols, recorded_term, statically_known_true

aten = torch.ops.aten


def _assert_async(checks: Checks, node: Node) -> Verdict:
    """torch._assert_async(condition): a tensor of one element that must not be 0."""
    tested = node.args[0]
    assert isinstance(tested, Node)
    values = checks.values(tested)
    if checks.aliases.edited(tested) or not values.intervals or values.nan or 0 in values:
        return Reject(f"the assert stays: {checks.proof(tested)}", node)
    return Dead("assert removed", f"it always holds: {checks.ranges.of(tested).because}")


def _assert_scalar(checks: Checks, node: Node) -> Verdict:
    """An assert about sizes."""
    tested = node.args[0]
    condition = tested.meta["val"] if isinstance(tested, Node) else tested
    if _depends_on_data(condition):
        return None
    holds = statically_known_true(condition != 0)  # type: ignore[operator, arg-type]
    return Dead("assert removed", "it holds for every input size") if holds else None


def _depends_on_data(number: object) -> bool:
    """By the term that was written: what torch believes of such a number, u0 == 5, it believes because of asserts."""
    return isinstance(number, torch.SymBool | torch.SymInt) and bool(free_unbacked_symbols(recorded_term(number)))


def _require(checks: Checks, node: Node) -> Verdict:
    """A condition on sizes that depend on data, of which another check may have proved that they are an input's."""
    return Dead("size condition removed", "it holds for every input size") if follows(node) else None


def _constrain_range(checks: Checks, node: Node) -> Verdict:
    arguments = arguments_of(node)
    size = arguments["size"] if "size" in arguments else arguments["self"]
    value = size.meta["val"] if isinstance(size, Node) else size
    low, high = arguments.get("min"), arguments.get("max")
    low = 0 if low is None and "for_size" in str(node.target) else low
    if _depends_on_data(value):
        return None
    holds = all(
        bound is None or statically_known_true(value >= bound if is_low else value <= bound)  # type: ignore[operator]
        for bound, is_low in ((low, True), (high, False))
    )
    return Dead("size assert removed", "it holds for every input size") if holds else None


def _assert_metadata(checks: Checks, node: Node) -> Verdict:
    """Dtype, device and layout are part of what a graph is captured for."""
    arguments = arguments_of(node)
    tensor = tensor_of(arguments["a"])  # type: ignore[arg-type]
    if tensor is None or arguments["size"] is not None or arguments["stride"] is not None:
        return None
    for name in ("dtype", "device", "layout"):
        if arguments.get(name) is not None and arguments[name] != getattr(tensor, name):
            return None
    return Dead("metadata assert removed", "part of what the graph was captured for")


HANDLERS: dict[object, Handler] = {
    aten._assert_async.default: _assert_async,
    aten._assert_async.msg: _assert_async,
    aten._assert_scalar.default: _assert_scalar,
    aten._assert_tensor_metadata.default: _assert_metadata,
    require: _require,
    aten.sym_constrain_range.default: _constrain_range,
    aten.sym_constrain_range_for_size.default: _constrain_range,
}
