"""Puts features into the form that a capture has, where the model reads no more of them than that form says.

Keys may be others and in another order, and offsets may be known besides the lengths. Where features have batch sizes
of their own, and inverse indices that say which bag each row of the batch has, they become features of that batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt import trees
from fxopt.runtime.flatten import Flatten, flattener
from fxopt.runtime.keyed.reads import Read, reads_of
from fxopt.runtime.moment import NotNow

if TYPE_CHECKING:
    from fxopt.capture import Capture

_ORDERS = 64  # of keys, that a form remembers
# Ids of a bag that are looked up again: with 2 a call is 3.8x as fast as eager, 1.2x with 18, 0.3x with 48.
_REPEATED = 8
_Jagged = tuple[Tensor, Tensor | None, Tensor]  # ids [N], their weights [N], lengths [F * B] or [F, B]


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
    found = reads_of(model, args, kwargs)
    if found is None:
        return lambda args, kwargs: None
    reads, constants = iter(found), dict(capture.constants)

    def form(node: pytree.TreeSpec, at: int) -> _Form | None:
        if not trees.is_features(node.type):
            return None
        given = [constants.get(at + child, ...) is not None for child in range(node.num_children)]
        return _Form(node.context, given, next(reads))

    flatten = flattener(spec, constants, form)

    def flattened(args: tuple, kwargs: dict) -> tuple | None:
        try:
            return flatten(args, kwargs)
        except (_OtherForm, NotNow, RuntimeError):  # of an operator on what eager may refuse as well
            return None

    return flattened


def of_one_batch(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments with features of one batch size, where some have sizes of their own and that is all the same.

    Raises:
        NotNow: that would be slower.
    """
    features = trees.features_in((args, kwargs))
    if all(_strides(each) is None for each in features):
        return None
    reads = reads_of(model, args, kwargs)
    if reads is None:
        return None
    try:
        made = {id(each): _of_one_batch(each, read) for each, read in zip(features, reads, strict=True)}
    except (_OtherForm, RuntimeError):
        return None
    return trees.replaced((args, kwargs), made)


def _of_one_batch(features: Any, read: Read) -> Any:
    values, weights, lengths = _jagged(features, read)
    return type(features)(features.keys(), values, weights, lengths)


class _Form:
    """Puts features into the form of a capture, as what flattens them.

    Args:
        keys: of the capture, in its order.
        given: which of the children the capture has: values, weights, lengths, offsets, and those of other batch sizes.
        read: what the model reads.
    """

    def __init__(self, keys: Sequence[str], given: Sequence[bool], read: Read) -> None:
        self._keys, self._read = list(keys), read
        _, _, self._with_lengths, self._with_offsets, *others = given
        self._one_batch = not any(others)
        self._places = functools.lru_cache(_ORDERS)(self._places_among)

    def __call__(self, features: Any) -> tuple[tuple, list[str]]:
        """The children and the keys.

        Raises:
            _OtherForm: keys are missing or not unique, or lengths or batch sizes do not fit.
        """
        if not self._one_batch:
            raise _OtherForm
        keys, (values, weights, lengths) = features.keys(), _jagged(features, self._read)
        if keys != self._keys:
            values, weights, lengths = _picked((values, weights, lengths), len(keys), self._places(tuple(keys)))
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1)) if self._with_offsets else None
        return (values, weights, lengths if self._with_lengths else None, offsets, None, None), self._keys

    def _places_among(self, keys: tuple[str, ...]) -> Tensor:
        """Where the features of the capture stand; for one that nobody reads, any will do."""
        places = {key: place for place, key in enumerate(keys)}
        if not places or len(places) < len(keys) or not self._read.names <= places.keys():
            raise _OtherForm
        return torch.tensor([places.get(key, 0) for key in self._keys], dtype=torch.int32, device="cpu")


def _strides(features: Any) -> Tensor | None:
    """How many bags each feature has from each rank, [F, ranks]; None where they have one batch size."""
    return pytree.SUPPORTED_NODES[type(features)].flatten_fn(features)[0][4]


def _jagged(features: Any, read: Read) -> _Jagged:
    """Ids, weights and lengths of features that have one batch size, or are given one."""
    given = [features.lengths_or_none(), features.offsets_or_none()]
    sizes = {each.numel() - at for at, each in enumerate(given) if each is not None}
    if len(sizes) != 1 or -1 in sizes:
        raise _OtherForm
    jagged = features.values(), features.weights_or_none(), features.lengths()  # it keeps them, as in eager
    strides, inverse = _strides(features), features.inverse_indices_or_none()
    if features.variable_stride_per_key() != (strides is not None):
        raise _OtherForm
    if strides is None and inverse is None:
        return jagged
    if strides is None or inverse is None or not read.pooled:
        raise _OtherForm
    return _expanded(jagged, strides.sum(1), inverse[1])


def _expanded(jagged: _Jagged, bags: Tensor, inverse: Tensor) -> _Jagged:
    """Features of `bags` [F] bags as features of the batch whose rows have the bags `inverse` [F, B]."""
    values, weights, lengths = jagged
    fits = inverse.dim() == 2 and len(inverse) == len(bags) and inverse.numel() and int(bags.sum()) == lengths.numel()
    if not fits or bool(((inverse < 0) | (inverse >= bags[:, None])).any()):
        raise _OtherForm
    _check(jagged)
    places = (inverse + (bags.cumsum(0) - bags)[:, None]).flatten().int()
    if int(lengths.view(-1)[places].sum()) > len(values) + _REPEATED * len(places):
        raise NotNow("bags of many ids are used in many rows, and eager looks up each bag once")
    made, ids, scales = torch.ops.fbgemm.permute_1D_sparse_data(places, lengths.view(-1), values, weights, None)
    return ids, scales, made


def _picked(jagged: _Jagged, count: int, places: Tensor) -> _Jagged:
    """The features at some places of `count`."""
    values, weights, lengths = jagged
    if lengths.numel() % count:
        raise _OtherForm
    _check(jagged)
    bags, ids, scales = torch.ops.fbgemm.permute_2D_sparse_data(places, lengths.view(count, -1), values, weights, None)
    return ids, scales, bags if lengths.dim() > 1 else bags.view(-1)


def _check(jagged: _Jagged) -> None:
    """FBGEMM moves ids by the lengths that it is given, and moves no gradients.

    Raises:
        _OtherForm: the lengths are not those of the ids, or gradients go to the weights of the ids.
    """
    values, weights, lengths = jagged
    weighted = weights is None or (weights.shape == values.shape and not weights.requires_grad)
    fits = weighted and values.dim() == 1 and values.device.type == lengths.device.type == "cpu"
    if not fits or int(lengths.sum()) != len(values) or bool((lengths < 0).any()):
        raise _OtherForm
