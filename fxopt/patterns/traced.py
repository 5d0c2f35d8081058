"""Patterns written as PyTorch: the function is the search graph, the reference, and the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from fxopt.normalize import normalize
from fxopt.shape.aliases import Aliases
from fxopt.torch_internals.tracing import make_fx

aten = torch.ops.aten
_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default}


class Traced:
    """`function(*tensors)` as a pattern; its parameter names are what a match binds.

    Args:
        function: executable PyTorch with one tensor result, traced and normalized like any model.
        examples: tensors that it runs on; only their ranks and dtypes matter.
    """

    def __init__(self, function: Callable[..., torch.Tensor], *examples: torch.Tensor) -> None:
        self.function = function
        self.examples = examples
        self.names = tuple(inspect.signature(function).parameters)

    @cached_property
    def _anchor(self) -> Node:
        distinct = [example.clone() for example in self.examples]  # one tensor twice would be one argument
        traced = make_fx(self.function, pre_dispatch=True)(*distinct)
        normalize(traced)
        placeholders = traced.graph.find_nodes(op="placeholder")
        for name, node in zip(self.names, placeholders, strict=True):
            node.meta["binds"] = name
        (output,) = traced.graph.find_nodes(op="output")
        return output.args[0]

    def match(self, node: Node, aliases: Aliases) -> dict[str, Node] | None:
        """What the parameters stand for where `node` computes the pattern; None where it does not."""
        if node.target != self._anchor.target:
            return None
        bound = _matched(self._anchor, node, {})
        return bound if bound is not None and not any(map(aliases.edited, bound.values())) else None


Bound = dict[str, Any]


def _matched(pattern: Any, value: Any, bound: Bound) -> Bound | None:
    """`bound` with what `pattern` adds to it; None where `value` differs."""
    if isinstance(pattern, Node):
        if not isinstance(value, Node):
            return None
        if "binds" in pattern.meta:
            name = pattern.meta["binds"]
            return {**bound, name: value} if bound.get(name, value) is value else None
        return _matched_call(pattern, value, bound)
    if isinstance(pattern, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(pattern):
            return None
        return _matched_all(pattern, value, bound)
    return bound if type(pattern) is type(value) and pattern == value else None


def _matched_call(pattern: Node, value: Node, bound: Bound) -> Bound | None:
    if pattern.target != value.target or pattern.kwargs != value.kwargs or len(pattern.args) != len(value.args):
        return None
    found = _matched_all(pattern.args, value.args, bound)
    if found is None and pattern.target in _COMMUTATIVE:
        found = _matched_all(pattern.args, value.args[1::-1] + value.args[2:], bound)
    return found


def _matched_all(patterns: Any, values: Any, bound: Bound | None) -> Bound | None:
    for pattern, value in zip(patterns, values, strict=True):
        bound = None if bound is None else _matched(pattern, value, bound)
    return bound
