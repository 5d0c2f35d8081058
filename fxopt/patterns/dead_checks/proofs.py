"""What the search for dead checks works with: proofs, words for the report, and what may stand for a removed node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.fx import Node

from fxopt.patterns.constants import Number, constant_of
from fxopt.patterns.core import Reject, Search
from fxopt.shape.calls import FILLS, arguments_of
from fxopt.shape.ranges.analysis import Ranges
from fxopt.shape.ranges.values import Values
from fxopt.shape.sizes import Size, is_tensor, same, same_shape, shape_of, static, tensor_of
from fxopt.shape.view_operators import CASTS, through

aten = torch.ops.aten
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass(frozen=True)
class Dead:
    """A check that changes nothing.

    what, why: the words of the report; `why` is the proof.
    keeps: name of the argument that has the check's value to the bit; "" where the check has no value.
    copied: how, where the value must be memory of its own.
    merged: (first, last) dims of the kept argument that the check flattens into one.
    equal: a size that depends on data, and the one that it always is.
    """

    what: str
    why: str
    keeps: str = ""
    copied: torch.memory_format | None = None
    merged: tuple[int, int] | None = None
    equal: tuple[tuple[Size, Size], ...] = ()


Verdict = Dead | Reject | None


class Checks(Search):
    """Facts about one graph, as the handlers of checks ask for them."""

    @functools.cached_property
    def ranges(self) -> Ranges:
        return Ranges(self.graph, self.aliases)

    def values(self, value: object) -> Values:
        return self.ranges.of_value(value).values

    def constant(self, value: object) -> Number | None:
        """The one number that `value` is, everywhere and always."""
        return self.values(value).number

    def proof(self, node: Node) -> str:
        """What is known of a tensor, in words."""
        known, dtype = self.ranges.of(node), node.meta["val"].dtype
        if known.values == Values.of_dtype(dtype):
            return f"{noun(node)} may be any {str(dtype).removeprefix('torch.')}"
        return f"{noun(node)} are in {known.values}" + (f" from {known.because}" if known.because else "")

    def proof_of(self, mask: Node, always: bool) -> str:
        """Why a condition is constant, in words."""
        tested = tested_by(mask)
        proof = self.proof(tested) if tested is not None else self.ranges.of(mask).because
        return f"{told(mask)} is always {always}: {proof}"

    def stands_for(self, node: Node, kept: object) -> bool:
        """Whether an argument with a check's values has its dtype, device and shape too, and nobody edits either."""
        return self.same_kind(node, kept) and same_shape(kept, node)  # type: ignore[arg-type]

    def same_kind(self, node: Node, kept: object) -> bool:
        if not is_tensor(kept) or tensor_of(node) is None:
            return False
        before, after = node.meta["val"], kept.meta["val"]
        if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
            return False
        return not (self.aliases.edited(node) or self.aliases.edited(kept))

    def may_be_shared(self, node: Node, kept: Node) -> bool:
        """Whether no code outside of the graph can edit one of two tensors that become one."""
        return not (self.aliases.leaves(node) or self.aliases.leaves(kept))

    def _must_copy(self, node: Node, kept: Node) -> bool:
        """Whether `kept` may not take `node`'s place as it is; a later view would notice other strides."""
        if not self.may_be_shared(node, kept):
            return True
        if is_line(kept):
            return False
        before, after = node.meta["val"].stride(), kept.meta["val"].stride()
        return not (_is_fresh(kept) and all(map(same, before, after)))

    def pass_on(self, node: Node, name: str, why: str, what: str = "", float_gradient: bool = False) -> Dead | None:
        """The elementwise `node` gives its argument `name` unchanged, if that can stand for it.

        float_gradient: the gradient of that argument is `node`'s own, everywhere.
        """
        kept = arguments_of(node)[name]
        if not self.stands_for(node, kept):
            return None
        if not (self.inference or float_gradient or not node.meta["val"].is_floating_point()):
            return None
        assert isinstance(kept, Node)
        copied = torch.preserve_format if self._must_copy(node, kept) else None
        # what they give is contiguous, whatever they read
        if node.target in FILLS and self.strides.asked(node) > self.strides.known(kept):
            copied = torch.contiguous_format
        return Dead(f"{what or told_call(node)} removed", why, name, copied)


Handler = Callable[[Checks, Node], Verdict]


def either_side(gives: Callable[[Checks, Node, str, object], Dead | None]) -> Handler:
    """For an operator of two: the first operand that it gives unchanged, by its name and the other one."""

    def handle(checks: Checks, node: Node) -> Verdict:
        given = arguments_of(node)
        found = (gives(checks, node, kept, given[other]) for kept, other in (("self", "other"), ("other", "self")))
        return next(filter(None, found), None)

    return handle


def _is_fresh(node: Node) -> bool:
    """Whether its memory is made in this graph: the strides of inputs are not known."""
    while (viewed := through(node)) is not None:
        node = viewed[0]
    return node.op == "call_function"


def is_line(node: Node) -> bool:
    """Whether every view of a tensor works whatever its strides are: at most one dim is more than 1."""
    return sum(static(size) != 1 for size in shape_of(node)) <= 1


def is_integer(node: object) -> TypeGuard[Node]:
    """A tensor of ids, or of something like them."""
    tensor = tensor_of(node)
    return tensor is not None and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def uncast(node: Node) -> Node | None:
    """What a view or a cast reads."""
    viewed = through(node)
    source = viewed[0] if viewed else node.args[0] if node.target in CASTS else None
    return source if isinstance(source, Node) else None


def from_integers(node: Node) -> bool:
    """Floats that are casts of integers: each a whole number, and no minus zero among them."""
    while node.meta["val"].is_floating_point():
        source = uncast(node)
        if source is None:
            return False
        node = source
    return not node.meta["val"].is_complex()


def tested_by(mask: Node) -> Node | None:
    """x of `x compare constant`, or of its negation."""
    if mask.target in (aten.logical_not.default, aten.bitwise_not.default):
        return tested_by(mask.args[0])  # type: ignore[arg-type]
    if _sign(mask) is None:
        return None
    left, right = mask.args[:2]
    if not isinstance(left, Node) or constant_of(left) is not None:
        left, right = right, left
    return left if isinstance(left, Node) and constant_of(right) is not None else None


def _sign(mask: Node) -> str | None:
    target = mask.target
    return _SIGNS.get(target._schema.name.removeprefix("aten::")) if isinstance(target, torch._ops.OpOverload) else None


def noun(node: Node) -> str:
    dtype = node.meta["val"].dtype
    return "values" if dtype.is_floating_point or dtype.is_complex else "bools" if dtype == torch.bool else "ids"


def told(value: object) -> str:
    """An argument as a person writes it: 100, "ids", "ids >= 0"."""
    number = constant_of(value)
    if number is not None:
        return f"{number:.9g}" if isinstance(number, float) else str(number)
    if not isinstance(value, Node):
        return str(value)
    if value.target in (aten.logical_not.default, aten.bitwise_not.default):
        return f"not ({told(value.args[0])})"
    sign = _sign(value)
    if sign is not None:
        return f"{told(value.args[0])} {sign} {told(value.args[1])}"
    return noun(value) if tensor_of(value) is not None else value.name


def told_call(node: Node) -> str:
    """A check and its arguments: clamp(0, 100), where(ids < 0, 0, ids)."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name, given = node.target._schema.name.removeprefix("aten::").strip("_"), arguments_of(node)
    if next(iter(given)) == "self":
        del given["self"]
    parts = [(key, told(value)) for key, value in given.items() if value is not None]
    named = len(parts) < len(given)
    return f"{name}({', '.join(f'{key}={text}' if named else text for key, text in parts)})"
