"""Every spelling of a view, read as data and carried out again: by torch's operators, and by strides alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.patterns.attention.strided import Strided, strided
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.view_operators import REPEATS, through
from fxopt.shape.view_steps import Contiguous, Expand, Permute, Reshape, Select, Slice, Step, Unsqueeze, regrouped
from fxopt.shape.views import View

aten = torch.ops.aten
Reads = Callable[[Tensor], Tensor]

ORDERED: list[Reads] = [
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(-1, 0),
    lambda x: x.swapaxes(0, 2),
    lambda x: x.swapdims(-2, -1),
    lambda x: x.permute(2, 0, -2),
    lambda x: x.movedim(0, -1),
    lambda x: x.movedim((0, 2), (1, 0)),
    lambda x: x.mT,
    lambda x: x.mH,
    lambda x: x.adjoint(),
    lambda x: x[0].t(),
    lambda x: x[0].T,
]
CUT: list[Reads] = [
    lambda x: x[:, 1:3],
    lambda x: x[:, -3:-1],
    lambda x: x[:, -9:2],
    lambda x: x[:, 2:],
    lambda x: x.narrow(-1, 2, 3),
    lambda x: x[:, -1],
    lambda x: x.select(-1, 3),
    lambda x: x.unbind(1)[2],
    lambda x: x.unbind(-1)[0],
    lambda x: x.split(3, 2)[1],
    lambda x: x.split([1, 4, 1], -1)[1],
    lambda x: x.chunk(4, 2)[2],
]
REGROUPED: list[Reads] = [
    lambda x: x.unsqueeze(-2),
    lambda x: x.unsqueeze(0).squeeze(),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.unsqueeze(1).squeeze((1,)),
    lambda x: x.flatten(1),
    lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)),
    lambda x: x.flatten(1).reshape(-1, 2, 2, 6),
    lambda x: x.view(x.shape[0], 2, 12),
    lambda x: x.view(x.shape[0] * 2, 2, 6),
    lambda x: x.reshape(x.shape[0], -1).ravel(),
    lambda x: x.view_as(x.clone()),
    lambda x: x.reshape_as(x.clone()),
    lambda x: x.contiguous().clone(),
]
SPREAD: list[Reads] = [
    lambda x: x.unsqueeze(1).expand(-1, 5, -1, -1),
    lambda x: x[:, :1].expand_as(x),
    lambda x: x[:1].expand(x.shape),
    lambda x: x.expand(2, -1, -1, -1),
    lambda x: x[:, :, :1].expand(x.shape).flatten(1),
]
MIXED: list[Reads] = [
    lambda x: x.view(x.shape[0], 4, 2, 3).transpose(1, 2).flatten(0, 1)[..., 1],
    lambda x: x.flatten(0, 1)[..., 2:4].unflatten(0, (-1, 4)).transpose(0, 1),
    lambda x: x.unsqueeze(-1).expand(-1, -1, -1, 2).flatten(2).unflatten(2, (3, 4)),
    lambda x: x.view(x.shape[0], 2, 12)[:, :, 5],
    lambda x: x.flatten(1)[:, 17],
]
ALL = [*ORDERED, *CUT, *REGROUPED, *SPREAD, *MIXED]


class Model(nn.Module):
    """A view of [B, 4, 6], where only B depends on the input."""

    def __init__(self, view: Reads, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.view, self.weight = view, nn.Parameter(torch.randn(4, 6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x[:, None, None] + self.weight) * 2.0


def read(view: Reads, dtype: torch.dtype = torch.float32) -> Node:
    """The node that the view becomes."""
    module = capture(Model(view, dtype), (torch.randn(5, dtype=dtype),)).graph
    normalize(module)
    node = next(node for node in module.graph.nodes if node.target is aten.mul.Tensor).args[0]
    assert isinstance(node, Node)
    return node


def is_base(node: Node) -> bool:
    return node.target is aten.add.Tensor


@pytest.mark.parametrize("view", ALL)
def test_the_steps_of_a_view_make_it_again(view: Reads) -> None:
    x = torch.randn(5, 4, 6)
    assert torch.equal(_carried_out(read(view), x), view(x))


def _carried_out(node: Node, x: Tensor) -> Tensor:
    if is_base(node):
        return x
    source, step = through(node, REPEATS) or (node, None)
    assert step is not None
    return _stepped(_carried_out(source, x), step)


def _stepped(x: Tensor, step: Step) -> Tensor:
    match step:
        case Slice(dim, start, size, to_end):
            known = static(size)
            assert to_end == (known is None or start + known == x.shape[dim])
            return x[(slice(None),) * dim + (slice(start, None if known is None else start + known),)]
        case Select(dim, index):
            return x.select(dim, index)
        case Permute(order):
            return x.permute(order)
        case Unsqueeze(dim):
            return x.unsqueeze(dim)
        case Reshape(shape):
            return x.reshape([-1 if known is None else known for known in map(static, shape)])
        case Expand(shape):
            return x.expand([5 if known is None else known for known in map(static, shape)])
    assert isinstance(step, Contiguous)
    return x


@pytest.mark.parametrize("view", ALL)
def test_regular_steps_reach_the_same_elements(view: Reads) -> None:
    x = torch.randn(5, 4, 6)
    found = strided(read(view))
    assert is_base(found.base)
    assert torch.equal(_walked(found, x).reshape(view(x).shape), view(x))


def _walked(found: Strided, x: Tensor) -> Tensor:
    """By the description alone; dims of the base that no factor walks have one index."""
    factors = [factor for axis in found.axes for factor in axis]
    sizes = [x.shape[0] if static(factor.size) is None else int(factor.size) for factor in factors]
    strides = [0 if factor.dim < 0 else x.stride(factor.dim) * factor.step for factor in factors]
    return x.as_strided(sizes, strides, sum(x.stride(dim) * start for dim, start in found.starts))


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x.transpose(1, 2).reshape(x.shape)])
def test_what_has_no_regular_steps_is_read_by_itself(view: Reads) -> None:
    node = read(view)
    assert strided(node).base is node


def test_a_conjugate_is_no_permutation() -> None:
    node = read(lambda x: x.mH, torch.complex64)
    viewed = through(node)
    assert viewed is None or viewed[1] is None


def test_repetitions_are_expansions_of_dims_of_size_one() -> None:
    node = read(lambda x: x[:, :1].repeat(1, 3, 1))
    assert through(node) is None
    found = through(node, REPEATS)
    assert found is not None and found[1] == Expand(shape_of(node))


def test_dims_that_a_view_shows_whole() -> None:
    base = (5, 1, 3)
    view = View.of(base)
    assert view.whole_dims(base) == (0, None, 2)
    assert view.permute((2, 1, 0)).whole_dims(base) == (2, None, 0)
    assert view.expand((2, 5, 4, 3)).whole_dims(base) == (None, 0, None, 2)
    merged, cut, taken = view.reshape((15,)), view.slice(2, 0, 2, to_end=False), view.select(0, 1)
    assert merged is not None and cut is not None and taken is not None
    assert [each.whole_dims(base) for each in (merged, cut, taken)] == [None, None, None]
    assert view.after(Select(1, 0)).whole_dims(base) == (0, 2)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Sized:
    size: int


def test_regrouping_splits_an_axis_only_where_it_may() -> None:
    axes = [Sized(4), Sized(6)]
    assert regrouped(axes, (2, 12)) is None
    halves = regrouped(axes, (2, 12), lambda axis, outer: (Sized(outer), Sized(axis.size // outer)))
    assert halves is not None and [[axis.size for axis in dim] for dim in halves] == [[2], [2, 6]]
    assert regrouped(axes, (3, 8), lambda axis, outer: (Sized(outer), Sized(axis.size // outer))) is None


def test_the_spellings_call_what_they_are_called_for() -> None:
    """That capture has not made other operators of them: each reader is used."""
    targets = {str(node.target) for view in ALL for node in _behind(read(view))}
    for name in ("swapaxes", "movedim", "mT", "adjoint", "narrow", "chunk", "unbind", "expand_as"):
        assert any(f"aten.{name}." in target for target in targets), name


def _behind(node: Node) -> Iterator[Node]:
    yield node
    for source in node.all_input_nodes:
        yield from _behind(source)
