"""Features of TorchRec in another form than a capture has: other keys, another order, offsets besides the lengths.

TorchRec's collections look features up by name, and read the lengths of bags and not the offsets that say the same. So
where a model gives a KeyedJaggedTensor to such collections alone, one capture serves every form of it: the features are
put into the form of the capture. The model's Python is traced on stand-ins, to be sure that nothing else reads them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxopt import trees
from fxopt.capture.state import has_hooks
from fxopt.runtime.flatten import Flatten, flattener
from fxopt.runtime.sharded.division import Division, divided
from fxopt.runtime.sharded.trace import NotTraced, traced

if TYPE_CHECKING:
    from fxopt.capture import Capture

_COLLECTIONS = {
    (f"torchrec.{place}.embedding_modules", f"Embedding{kind}Collection")
    for place in ("modules", "quant")
    for kind in ("", "Bag")
}
_KEEPS_AN_ORDER = "__cache_features_order"  # a quantized collection that believes in the order of its first call
_ORDERS = 64  # of keys, that a form remembers

Names = frozenset[str]


class _OtherForm(Exception):
    """Features that cannot be put into the form of a capture: their call has another signature."""


def any_form(capture: Capture, model: nn.Module, args: tuple, kwargs: dict) -> Flatten | None:
    """A flattener for calls that differ from those of a capture in the form of their features.

    Args:
        model: what was captured.
        args, kwargs: of a call that it serves in the mode of the capture.

    Returns:
        One that serves no call where the form may matter to the model; None where the arguments say nothing of it.
    """
    spec, features = capture.in_spec, trees.features_in((args, kwargs))
    kinds = [node.type for node in trees.nodes(spec) if trees.is_features(node.type)]
    if not features or len(kinds) != len(features):
        return None
    read = names_read(model, args, kwargs)
    if read is None:
        return lambda args, kwargs: None
    names, constants = iter(read), dict(capture.constants)

    def form(node: pytree.TreeSpec, at: int) -> _Form | None:
        if not trees.is_features(node.type):
            return None
        given = [constants.get(at + child, ...) is not None for child in range(node.num_children)]
        return _Form(node.context, given, next(names))

    flatten = flattener(spec, constants, form)

    def flattened(args: tuple, kwargs: dict) -> tuple | None:
        try:
            return flatten(args, kwargs)
        except _OtherForm:
            return None

    return flattened


class _Form:
    """Puts features into the form of a capture, as what flattens them.

    Args:
        keys: of the capture, in its order.
        given: which of the children the capture has: values, weights, lengths, offsets, and those of other batch sizes.
        names: the keys that the model reads.
    """

    def __init__(self, keys: Sequence[str], given: Sequence[bool], names: Names) -> None:
        self._keys, self._given, self._names = list(keys), given, names
        self._places = functools.lru_cache(_ORDERS)(self._places_among)

    def __call__(self, features: Any) -> tuple[tuple, list[str]]:
        """The children and the keys.

        Raises:
            _OtherForm: keys are missing or not unique, lengths do not fit, or batch sizes differ between features.
        """
        (values, weights, lengths, offsets, *others), keys = pytree.SUPPORTED_NODES[type(features)].flatten_fn(features)
        sizes = [lengths.numel()] if lengths is not None else []
        sizes += [offsets.numel() - 1] if offsets is not None else []
        if any(other is not None for other in others) or len(set(sizes)) != 1 or sizes[0] < 0:
            raise _OtherForm
        lengths = features.lengths()  # it keeps them, as in eager
        if keys != self._keys:
            values, weights, lengths = _picked(values, weights, lengths, len(keys), self._places(tuple(keys)))
        with_lengths, with_offsets = self._given[2:4]
        made = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1)) if with_offsets else None
        return (values, weights, lengths if with_lengths else None, made, *others), self._keys

    def _places_among(self, keys: tuple[str, ...]) -> Tensor:
        """Where the features of the capture stand; for one that nobody reads, any will do."""
        places = {key: place for place, key in enumerate(keys)}
        if len(places) < len(keys) or not self._names <= places.keys():
            raise _OtherForm
        return torch.tensor([places.get(key, 0) for key in self._keys], dtype=torch.int32)


def _picked(
    values: Tensor, weights: Tensor | None, lengths: Tensor, count: int, places: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The features at some places of `count`.

    Raises:
        _OtherForm: lengths and ids do not fit, or gradients go to the weights of ids.
    """
    fits = lengths.numel() % count == 0 and values.dim() == 1 and lengths.device.type == "cpu"
    if weights is not None:
        fits = fits and weights.shape == values.shape and not weights.requires_grad
    if not fits or int(lengths.sum()) != len(values) or bool((lengths < 0).any()):
        raise _OtherForm
    bags, ids, scales = torch.ops.fbgemm.permute_2D_sparse_data(places, lengths.view(count, -1), values, weights, None)
    return ids, scales, bags if lengths.dim() > 1 else bags.view(-1)


def names_read(model: nn.Module, args: tuple, kwargs: dict) -> list[Names] | None:
    """The names by which a model looks up, in each KeyedJaggedTensor of a call; None where it reads more of one."""
    features = trees.features_in((args, kwargs))
    collections = {module: "looks features up by name" for module in model.modules() if _is_collection(module)}
    if not collections:
        return None
    division = divided(model, collections)
    if "" in division.boundaries:
        return [_names_of(model)] * len(features)
    try:
        hosts = traced(division, args, kwargs)
    except NotTraced:
        return None
    read: dict[int, set[str]] = {id(value): set() for value in features}
    for node, value in hosts.values.items():
        if trees.is_features(type(value)):
            names = [_names_by(user, node, division) for user in node.users]
            if None in names:
                return None
            read[id(value)].update(*(each for each in names if each is not None))
        elif trees.features_in(value) and any(user.target is not getattr for user in node.users):
            return None
    return [frozenset(read[id(value)]) for value in features]


def _names_by(user: fx.Node, features: fx.Node, division: Division) -> Names | None:
    """What one use of features looks up; None where that cannot be said."""
    if user.op == "call_module" and user.target in division.boundaries and user.all_input_nodes == [features]:
        return _names_of(division.boundaries[str(user.target)][0])
    if user.op == "call_function" and user.target is operator.getitem and isinstance(user.args[1], str):
        return frozenset((user.args[1],))
    return None


def _is_collection(module: nn.Module) -> bool:
    """Of exactly the classes whose forwards look features up by name, and do nothing else with them."""
    kind = type(module)
    known = (kind.__module__, kind.__qualname__) in _COLLECTIONS
    return known and not has_hooks(module) and not getattr(module, _KEEPS_AN_ORDER, False)


def _names_of(collection: Any) -> Names:
    """A quantized collection has one list of names, any other a list for each table."""
    names = collection._feature_names
    return frozenset(name for each in names for name in ([each] if isinstance(each, str) else each))
