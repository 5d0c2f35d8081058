"""Arguments and results as leaves and a TreeSpec: torch's pytrees, and dataclasses that nobody has registered.

Registering a user's class would be seen by the whole process (and by the user, who may do it later), so an instance is
wrapped on its way into a TreeSpec, and comes out of it as an instance again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

_DENSE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DEPTH = 8  # of dataclasses within dataclasses; one that holds itself has no end


def is_dense(leaf: object) -> bool:
    """Whether it is a tensor of torch's own classes whose numbers lie by sizes and strides."""
    return type(leaf) in _DENSE and leaf.layout is torch.strided  # type: ignore[attr-defined]


def unread(leaf: object) -> str:
    """The class of an argument that nobody can look into, and what to do about it."""
    array = isinstance(leaf, np.ndarray)
    hint = "from_numpy makes it a tensor" if array else "utils._pytree.register_pytree_node says what it consists of"
    return f"{type(leaf).__qualname__} (torch.{hint})"


class Record:
    """An instance of a dataclass whose fields are children: the node type of its TreeSpec, with (class, names)."""

    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind, self.names, self.values = kind, names, values


def _children(record: Record) -> tuple[list[Any], Any]:
    return record.values, (record.kind, record.names)


def _children_with_keys(record: Record) -> tuple[list[tuple[Any, Any]], Any]:
    keys = map(pytree.GetAttrKey, record.names)
    return list(zip(keys, record.values, strict=True)), (record.kind, record.names)


def instance(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """Without __init__ or __post_init__: the values are those of an instance that has been through both."""
    kind, names = context
    made: Any = object.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(Record, _children, instance, flatten_with_keys_fn=_children_with_keys)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    values, spec = pytree.tree_flatten(tree)
    return pytree.tree_flatten(_with_records(tree)) if any(map(_is_record, values)) else (values, spec)


def flatten_with_path(tree: Any) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
    tree = _with_records(tree)
    paths: list[tuple[pytree.KeyPath, Any]] = []
    for path, value in pytree.tree_flatten_with_path(tree, is_leaf=_has_no_paths)[0]:
        if _has_no_paths(value):
            paths += [((*path, pytree.SequenceKey(i)), leaf) for i, leaf in enumerate(pytree.tree_leaves(value))]
        else:
            paths.append((path, value))
    return paths, pytree.tree_structure(tree)


def _has_no_paths(value: Any) -> bool:
    """Whether its class was registered without names for its children, as TorchRec's KeyedTensor is."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    return pytree.tree_leaves(_with_records(tree), is_leaf)


def is_features(kind: type | None) -> bool:
    """Whether it is TorchRec's KeyedJaggedTensor."""
    named = (getattr(kind, "__module__", ""), getattr(kind, "__qualname__", ""))
    return named == ("torchrec.sparse.jagged_tensor", "KeyedJaggedTensor")


def features_in(tree: Any) -> list[Any]:
    """The KeyedJaggedTensors of a tree, in the order of its TreeSpec."""
    found = leaves(tree, lambda value: is_features(type(value)))
    return [leaf for leaf in found if is_features(type(leaf))]


def inverts_in_order(features: Any) -> bool:
    """Whether the inverse indices have the keys of the features. The pytree does not tell those that they have."""
    inverse = features.inverse_indices_or_none()
    return inverse is None or list(inverse[0]) == features.keys()


def nodes(spec: pytree.TreeSpec) -> Iterator[pytree.TreeSpec]:
    """It and all that it consists of, from left to right."""
    yield spec
    for child in spec.children():
        yield from nodes(child)


def unflatten(values: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """A torch.Size comes out as one, of which pytree makes a tuple."""
    if all(node.type is not torch.Size for node in nodes(spec)):
        return pytree.tree_unflatten(values, spec)
    if spec.type is torch.Size:
        return torch.Size(values)
    left = iter(values)
    children = [unflatten(list(itertools.islice(left, child.num_leaves)), child) for child in spec.children()]
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def with_constants(values: Sequence[Any], constants: Iterable[tuple[int, Any]], spec: pytree.TreeSpec) -> Any:
    """Of the values and, each at its place among all leaves, the constants in order."""
    leaves = list(values)
    for place, constant in constants:
        leaves.insert(place, constant)
    return unflatten(leaves, spec)


def arguments_from(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], tuple[tuple, dict]]:
    """Of the (args, kwargs) of calls: what `unflatten` makes of their values, without a walk where all are leaves."""
    args, kwargs = spec.children()
    if any(not child.is_leaf() for part in (args, kwargs) for child in part.children()):
        return functools.partial(unflatten, spec=spec)
    return functools.partial(_divided, args.num_leaves, tuple(kwargs.context))


def _divided(count: int, names: tuple[str, ...], values: Sequence[Any]) -> tuple[tuple, dict]:
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


def map_only(kind: type, function: Any, tree: Any) -> Any:
    """`tree` with `function` of every leaf of this type; what is one object stays one."""
    values, spec = flatten(tree)
    made = {id(value): function(value) for value in {id(v): v for v in values if isinstance(v, kind)}.values()}
    return unflatten([made.get(id(value), value) for value in values], spec)


def replaced(tree: Any, others: Mapping[int, Any]) -> Any:
    """`tree` with others in place of what has these ids."""

    def known(value: Any) -> bool:
        return id(value) in others

    return pytree.tree_map(lambda leaf: others.get(id(leaf), leaf), _with_records(tree), is_leaf=known)


def at(tree: Any, path: pytree.KeyPath) -> Any:
    """What stands there in a tree; keys are classes of torch's pytrees."""
    return functools.reduce(lambda value, key: key.get(value), path, tree)  # type: ignore[attr-defined]


def with_filled(result: Any, tree: Any, paths: Sequence[pytree.KeyPath]) -> Any:
    """The result of a call together with what it has put into attributes of its arguments, if there are any."""
    return (result, [at(tree, path) for path in paths]) if paths else result


def fill(tree: Any, paths: Sequence[pytree.KeyPath], values: Sequence[Any]) -> None:
    """Attributes of arguments get what a call has put there."""
    for path, value in zip(paths, values, strict=True):
        setattr(at(tree, path[:-1]), path[-1].name, value)  # type: ignore[attr-defined]


def _with_records(tree: Any, depth: int = _DEPTH) -> Any:
    if not any(map(_is_record, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda leaf: _record(leaf, depth) if _is_record(leaf) else leaf, tree)


def _record(value: Any, depth: int) -> Any:
    if not depth:
        return value
    names = tuple(vars(value))
    return Record(type(value), names, [_with_records(vars(value)[name], depth - 1) for name in names])


def _is_record(leaf: Any) -> bool:
    """An instance that is its fields and nothing else: no slots, no further attributes, no other kind of object."""
    fields = getattr(type(leaf), "__dataclass_fields__", None)
    if fields is None or type(leaf).__new__ is not object.__new__:
        return False
    names = {field.name for field in dataclasses.fields(leaf)}
    return vars(leaf).keys() == names if hasattr(leaf, "__dict__") else False
