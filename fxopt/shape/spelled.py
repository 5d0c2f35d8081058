"""What an operator multiplies and sums, as the letters of an einsum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
Letters = tuple[Any, ...]


@dataclass(frozen=True)
class Spelled:
    """operands: with a letter a dim; out: the letters of the result. bias: (tensor, letters) added to it."""

    operands: tuple[tuple[Node, Letters], ...]
    out: Letters
    bias: tuple[Node, Letters] | None = None


def spelled(node: Node) -> Spelled | None:
    """None where `node` is no such operator, or does more."""
    reader = SPELLED.get(node.target)
    if reader is None or node.kwargs:
        return None
    try:
        return reader(*node.args)
    except (TypeError, ValueError):  # arguments of another kind: a scalar, a path, an ellipsis
        return None


def aligned(tensor: torch.Tensor, letters: Letters, order: Letters) -> torch.Tensor:
    """A tensor whose dims have these letters, with its dims in this order; those that it lacks have size 1."""
    moved = tensor.permute([letters.index(letter) for letter in order if letter in letters])
    for at, letter in enumerate(order):
        if letter not in letters:
            moved = moved.unsqueeze(at)
    return moved


def _matmul(left: Node, right: Node) -> Spelled:
    a, b = len(shape_of(left)), len(shape_of(right))
    batch = tuple(("batch", place) for place in range(max(a, b) - 2, 0, -1))
    first = (*batch[len(batch) - (a - 2) :], "i", "k") if a > 1 else ("k",)
    second = (*batch[len(batch) - (b - 2) :], "k", "j") if b > 1 else ("k",)
    return Spelled(((left, first), (right, second)), batch + ("i",) * (a > 1) + ("j",) * (b > 1))


def _linear(x: Node, weight: Node, bias: Node | None = None) -> Spelled:
    rows = tuple(("row", place) for place in range(len(shape_of(x)) - 1))
    if len(shape_of(weight)) != 2:
        raise ValueError
    return Spelled(((x, (*rows, "k")), (weight, ("j", "k"))), (*rows, "j"), _optional(bias, ("j",)))


def _addmm(bias: Node, left: Node, right: Node) -> Spelled:
    return _biased(_matmul(left, right), bias)


def _biased(call: Spelled, bias: Node) -> Spelled:
    return Spelled(call.operands, call.out, (bias, call.out[len(call.out) - len(shape_of(bias)) :]))


def _inner(left: Node, right: Node) -> Spelled:
    a, b = len(shape_of(left)), len(shape_of(right))
    first, second = (tuple((side, place) for place in range(rank - 1)) for side, rank in (("i", a), ("j", b)))
    return Spelled(((left, (*first, "k")), (right, (*second, "k"))), first + second)


def _einsum(equation: str, operands: list[Node]) -> Spelled:
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    words = [_letters(word, len(shape_of(operand))) for word, operand in zip(inputs.split(","), operands, strict=True)]
    if any(len(set(word)) != len(word) for word in words):  # a diagonal
        raise ValueError
    dots = max((word for word in words), key=lambda word: sum(isinstance(letter, tuple) for letter in word))
    dots = tuple(letter for letter in dots if isinstance(letter, tuple))
    if not arrow:
        once = sorted(letter for letter in {*inputs} - {",", "."} if inputs.count(letter) == 1)
        return Spelled(tuple(zip(operands, words, strict=True)), (*dots, *once))
    before, several, behind = out.partition("...")
    return Spelled(tuple(zip(operands, words, strict=True)), (*before, *(dots if several else ()), *behind))


def _letters(word: str, rank: int) -> Letters:
    """An ellipsis stands for dims that are counted from the last of them."""
    before, several, behind = word.partition("...")
    count = rank - len(before) - len(behind) if several else 0
    return (*before, *(("dot", place) for place in range(count, 0, -1)), *behind)


def _tensordot(left: Node, right: Node, dims_left: list[int], dims_right: list[int]) -> Spelled:
    sides: list[list[Any]] = []
    for side, (node, dims) in enumerate(((left, dims_left), (right, dims_right))):
        letters: list[Any] = [(side, place) for place in range(len(shape_of(node)))]
        for number, dim in enumerate(dims):
            letters[dim] = ("k", number)
        sides.append(letters)
    out = tuple(letter for letters in sides for letter in letters if letter[0] != "k")
    return Spelled(((left, tuple(sides[0])), (right, tuple(sides[1]))), out)


def _convolution(
    x: Node,
    weight: Node,
    bias: Node | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Spelled:
    """Kernels of size 1 with stride 1, or as large as the input; no padding, no groups."""
    sizes = list(zip(shape_of(x)[2:], shape_of(weight)[2:], strict=True))
    if len(shape_of(x)) != len(shape_of(weight)) or _differs(padding, 0) or _differs(dilation, 1) or groups != 1:
        raise ValueError
    kept = [static(kernel) == 1 for _, kernel in sizes]
    whole = [static(size) is not None and static(size) == static(kernel) for size, kernel in sizes]
    if not all(one or full for one, full in zip(kept, whole, strict=True)) or (_differs(stride, 1) and not all(whole)):
        raise ValueError
    at = tuple(("at", place) for place in range(len(sizes)))
    inside = tuple(letter if full else ("one", letter) for letter, full in zip(at, whole, strict=True))
    out = tuple(("one", letter) if full else letter for letter, full in zip(at, whole, strict=True))
    return Spelled(((x, ("b", "k", *at)), (weight, ("j", "k", *inside))), ("b", "j", *out), _optional(bias, ("j",)))


def _bilinear(x: Node, y: Node, weight: Node, bias: Node | None = None) -> Spelled:
    rows = tuple(("row", place) for place in range(len(shape_of(x)) - 1))
    operands = ((x, (*rows, "h")), (y, (*rows, "m")), (weight, ("j", "h", "m")))
    return Spelled(operands, (*rows, "j"), _optional(bias, ("j",)))


def _differs(given: Any, plain: int) -> bool:
    return any(value != plain for value in (given if isinstance(given, list | tuple) else [given]))


def _optional(bias: Node | None, letters: Letters) -> tuple[Node, Letters] | None:
    return None if bias is None else (bias, letters)


def _mul(left: Node, right: Node) -> Spelled:
    if not (isinstance(left, Node) and isinstance(right, Node)):
        raise TypeError
    a, b = len(shape_of(left)), len(shape_of(right))
    letters = tuple(range(max(a, b)))
    return Spelled(((left, letters[max(a, b) - a :]), (right, letters[max(a, b) - b :])), letters)


def _sum(x: Node, dims: list[int], keepdim: bool = False) -> Spelled:
    rank = len(shape_of(x))
    summed = {dim % rank for dim in dims} or set(range(rank))
    out = tuple(dim if dim not in summed else ("one", dim) for dim in range(rank) if keepdim or dim not in summed)
    return Spelled(((x, tuple(range(rank))),), out)


SPELLED: dict[Any, Callable[..., Spelled]] = {
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default), _matmul),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _addmm),
    aten.linear.default: _linear,
    aten.inner.default: _inner,
    aten.einsum.default: _einsum,
    aten.tensordot.default: _tensordot,
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default), _convolution),
    aten.bilinear.default: _bilinear,
    aten.mul.Tensor: _mul,
    aten.sum.dim_IntList: _sum,
}
