"""Argument and result structures as generated Python: a flattener per signature, no pytree walk per call.

A generated flattener checks exact container types, lengths, keys (in order) and constants, and returns
the tensors. torch.utils._pytree serves the node types that are not spelled out here.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxopt.runtime.instances import attributes_of
from fxopt.runtime.instances import instance as of_attributes
from fxopt.trees import Record, instance, inverts_in_order, is_features

# Values that cannot change under our feet: a match by equality stays a match.
_IMMUTABLE: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type)
_IMMUTABLE += (type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_constant(value: object) -> bool:
    return isinstance(value, _IMMUTABLE)


def same_value(a: object, b: object) -> bool:
    """Equal and of one type. Floats by their bits, so 0.0 is not -0.0 and NaN is NaN; tensors by identity."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()  # type: ignore[attr-defined]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    try:
        return bool(a == b)
    except Exception:  # an __eq__ that cannot answer (arrays): not the same
        return False


Flatten = Callable[[tuple, dict], tuple | None]
NodeFlatten = Callable[[Any], tuple[Sequence[Any], Any]]  # of a pytree node: its children and its context


def flattener(
    spec: pytree.TreeSpec,
    constants: dict[int, Any],
    special: Callable[[pytree.TreeSpec, int], NodeFlatten | None] = lambda spec, leaf: None,
) -> Flatten:
    """``flatten(args, kwargs)``: the tensor leaves in order, or None where structure or constants differ.

    Args:
        spec: TreeSpec of ``(args, kwargs)``.
        constants: leaf index to value, for the leaves that are not tensors.
        special: given a node that is registered as a pytree and the index of its first leaf, what flattens it in place
            of the function that was registered, if anything does.
    """
    source = _Flattener(constants, special)
    args, kwargs = spec.children()
    source.walk(args, "args")
    source.walk(kwargs, "kwargs")
    body = [*source.lines, f"    return ({''.join(part + ', ' for part in source.tensors)})"]
    return _compile("def generated(args, kwargs):", body, source.names)


def rebuilder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """``rebuild(flat)``: the model's result from its flat leaves."""
    names: dict[str, Any] = {}
    return _compile("def generated(o):", [f"    return {_rebuild(spec, 0, names)}"], names)


class _Flattener:
    def __init__(
        self, constants: dict[int, Any], special: Callable[[pytree.TreeSpec, int], NodeFlatten | None]
    ) -> None:
        self.constants, self.special = constants, special
        self.lines: list[str] = []
        self.tensors: list[str] = []
        self.names: dict[str, Any] = {"same": same_value}
        self.leaf = 0

    def walk(self, spec: pytree.TreeSpec, value: str) -> None:
        if spec.is_leaf():
            self.take_leaf(value)
            return
        values, children = self.enter(spec, value)
        if all(child.is_leaf() for child in children) and not self.constants_ahead(len(children)):
            self.tensors.extend([f"*{values}"] if children else [])
            self.leaf += len(children)
            return
        locals_ = [f"{value}_{i}" for i in range(len(children))]
        self.lines.append(f"    {', '.join(locals_)}, = {values}")
        for child, local in zip(children, locals_, strict=True):
            self.walk(child, local)

    def enter(self, spec: pytree.TreeSpec, value: str) -> tuple[str, list[pytree.TreeSpec]]:
        """Check the container `value`. Returns an expression that iterates over its children, and their specs."""
        kind = spec.type
        if kind in (tuple, list) or kind is namedtuple:
            expected = self.name(spec.context if kind is namedtuple else kind)
            self.require(f"type({value}) is {expected} and len({value}) == {spec.num_children}")
            return value, spec.children()
        if kind in (dict, OrderedDict):
            keys = self.name(tuple(spec.context))
            self.require(f"type({value}) is {self.name(kind)} and (*{value},) == {keys}")
            return f"{value}.values()", spec.children()
        if kind is Record:
            made, names = spec.context
            fields = self.name(frozenset(names))
            self.require(f"type({value}) is {self.name(made)} and vars({value}).keys() == {fields}")
            return f"({''.join(f'{value}.{name}, ' for name in names)})", spec.children()
        self.require(f"type({value}) is {self.name(kind)}")
        children, context = f"{value}_children", f"{value}_context"
        flatten = self.special(spec, self.leaf) or pytree.SUPPORTED_NODES[kind].flatten_fn
        self.lines.append(f"    {children}, {context} = {self.name(flatten)}({value})")
        self.require(f"len({children}) == {spec.num_children} and {context} == {self.name(spec.context)}")
        if is_features(kind):
            self.require(f"{self.name(inverts_in_order)}({value})")
        return children, spec.children()

    def take_leaf(self, value: str) -> None:
        if self.leaf not in self.constants:
            self.tensors.append(value)
        else:
            constant = self.constants[self.leaf]
            singleton = constant is None or isinstance(constant, bool)
            name = self.name(constant)
            self.require(f"{value} is {name}" if singleton else f"same({value}, {name})")
        self.leaf += 1

    def constants_ahead(self, count: int) -> bool:
        return any(i in self.constants for i in range(self.leaf, self.leaf + count))

    def require(self, condition: str) -> None:
        self.lines.append(f"    if not ({condition}): return None")

    def name(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name


def _rebuild(spec: pytree.TreeSpec, start: int, names: dict[str, Any]) -> str:
    """An expression over the flat result `o`, whose leaves for `spec` begin at `start`."""
    if spec.is_leaf():
        return f"o[{start}]"

    def name(value: Any) -> str:
        key = f"k{len(names)}"
        names[key] = value
        return key

    kind = spec.type
    leaves = f"o[{start}:{start + spec.num_leaves}]"
    if kind is torch.Size:
        return f"{name(kind)}({leaves})"  # pytree makes a tuple of it
    children, at = [], start
    for child in spec.children():
        children.append(_rebuild(child, at, names))
        at += child.num_leaves
    flat = all(child.is_leaf() for child in spec.children())
    values = leaves if flat else f"({''.join(child + ', ' for child in children)})"
    if kind not in (tuple, list, dict, OrderedDict, Record) and kind is not namedtuple:
        known = attributes_of(kind, spec.context, len(children))
        if known is not None:
            parts = (f"{key!r}: {children[v] if isinstance(v, int) else name(v[0])}" for key, v in known.items())
            return f"{name(of_attributes)}({name(kind)}, {{{', '.join(parts)}}})"
        return f"{name(pytree.SUPPORTED_NODES[kind].unflatten_fn)}(list({values}), {name(spec.context)})"
    if kind is namedtuple:
        return f"{name(spec.context)}._make({values})"
    if kind is Record:
        return f"{name(instance)}({values}, {name(spec.context)})"
    if kind in (tuple, list):
        return f"{kind.__name__}({values})"
    return f"{name(kind)}(zip({name(tuple(spec.context))}, {values}))"


def _compile(head: str, body: list[str], names: dict[str, Any]) -> Callable:
    scope = dict(names)
    exec("\n".join([head, *body]), scope)  # the text holds only names and indices made above
    return scope["generated"]
