"""Sums of products of two columns each: what matmul, bmm, einsum or a loop over experts computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxopt.patterns.towers.steps import MixtureStep, ProductStep, Run, SoftmaxStep, Steps
from fxopt.shape.spelled import Letters, aligned

_MOST = 1 << 17  # products of one tensor; 8 experts of 1024 columns are 2**13


@dataclass(frozen=True)
class Terms:
    """Element i is the sum over t of left[i, t] * right[i, t]: numbers of columns, [*shape, terms] each."""

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.left.shape[:-1]


def contracted(left: Tensor, left_dims: Letters, right: Tensor, right_dims: Letters, dims: Letters) -> Terms | None:
    """einsum of two tensors of numbers, dims by letters; None where it is too large."""
    summed = tuple(dict.fromkeys(letter for letter in left_dims + right_dims if letter not in dims))
    sizes = dict(zip(left_dims + right_dims, (*left.shape, *right.shape), strict=True))
    for letter, size in zip(left_dims, left.shape, strict=True):
        sizes[letter] = max(sizes[letter], size)
    order = dims + summed
    if not set(dims) <= set(sizes) or math.prod(sizes[letter] for letter in order) > _MOST:
        return None
    shape = [sizes[letter] for letter in order]
    sides = (aligned(t, own, order) for t, own in ((left, left_dims), (right, right_dims)))
    both = [t.expand(shape).reshape(*shape[: len(dims)], -1) for t in sides]
    return Terms(*both)


def added(left: Terms, right: Terms) -> Terms:
    shape = torch.broadcast_shapes(left.shape, right.shape)
    pairs = ((left.left, right.left), (left.right, right.right))
    return Terms(*(torch.cat([t.expand(*shape, t.shape[-1]) for t in pair], -1) for pair in pairs))


def summed(terms: Terms, dims: Sequence[int], keep: bool) -> Terms:
    def moved(numbers: Tensor) -> Tensor:
        rank = numbers.dim() - 1
        gone = sorted(dim % rank for dim in dims)
        stays = [dim for dim in range(rank) if dim not in gone]
        t = numbers.permute(*stays, *gone, rank).flatten(len(stays))
        for dim in gone if keep else ():
            t = t.unsqueeze(dim)
        return t

    return Terms(moved(terms.left), moved(terms.right))


def computed(terms: Terms, steps: Steps) -> Tensor | None:
    """Numbers of the mixtures, or of the products, that the sums are; None where they are neither."""
    if terms.left.shape[-1] == 1:
        return _products(terms, steps)
    for gates, values in ((terms.left, terms.right), (terms.right, terms.left)):
        numbers = _mixed(gates, values, steps)
        if numbers is not None:
            return numbers.reshape(terms.shape)
    return None


def _products(terms: Terms, steps: Steps) -> Tensor | None:
    left, right = terms.left.flatten(), terms.right.flatten()
    breaks = ((left.diff() != 1) | (right.diff() != 1)).nonzero().flatten() + 1
    made = []
    for pair in zip(left.tensor_split(breaks), right.tensor_split(breaks), strict=True):
        (a,), (b,) = map(steps.runs, pair)
        if a.width < 2 or any(isinstance(steps[run.step], SoftmaxStep) for run in (a, b)):
            return None
        made.append(steps.numbers(ProductStep(a, b)))
    return torch.cat(made).reshape(terms.shape) if made else None


def _mixed(gates: Tensor, values: Tensor, steps: Steps) -> Tensor | None:
    n = gates.shape[-1]
    gates, values = gates.reshape(-1, n), values.reshape(-1, n)
    if not len(gates):
        return None
    breaks = ((gates.diff(dim=0) != 0) | (values.diff(dim=0) != 1)).any(1).nonzero().flatten() + 1
    made = []
    for gate, value in zip(gates.tensor_split(breaks), values.tensor_split(breaks), strict=True):
        order = gate[0].argsort()
        step = _mixture(gate[0][order], value[0][order], len(gate), steps)
        if step is None:
            return None
        made.append(steps.numbers(step))
    return torch.cat(made)


def _mixture(gate: Tensor, first: Tensor, width: int, steps: Steps) -> MixtureStep | None:
    """gate [E], ascending; first [E]: the first column of each expert."""
    weights, experts = (
        steps.runs(gate),
        [Run(steps.of(number), steps.column(number), width) for number in first.tolist()],
    )
    if any(isinstance(steps[run.step], SoftmaxStep) for run in experts) or width < 2:
        return None
    soft = [step for run in weights if isinstance(step := steps[run.step], SoftmaxStep)]
    if not soft:
        return MixtureStep(weights, False, tuple(experts), width)
    if len(weights) > 1 or soft[0].width != weights[0].width:
        return None  # some of the softmax, or more than one
    return MixtureStep(soft[0].logits, True, tuple(experts), width)
