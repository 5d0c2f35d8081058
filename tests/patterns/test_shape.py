"""Facts about graphs: strided views as data, and which values share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.patterns.embedding_columns.index_program import IndexPrograms
from fxopt.patterns.jagged.segments import Segments
from fxopt.shape.aliases import Aliases, is_pure, mutates
from fxopt.shape.sizes import product, same, static
from fxopt.shape.views import View

aten = torch.ops.aten


def parts(view: View | None) -> list[list[tuple[int, int, int]]] | None:
    """(dim, start, size) of every part of every axis."""
    if view is None:
        return None
    return [[(part.dim, part.start, int(part.size)) for part in axis.parts] for axis in view.axes]


def test_views_follow_slices_and_selects() -> None:
    base = View.of((6, 8))
    assert base.is_base
    cut = base.slice(1, 2, 4, to_end=False)
    assert cut is not None and parts(cut) == [[(0, 0, 6)], [(1, 2, 4)]] and not cut.is_base
    deeper = cut.slice(1, 1, 2, to_end=False)
    assert parts(deeper) == [[(0, 0, 6)], [(1, 3, 2)]]
    one = cut.select(1, 3)
    assert one is not None and parts(one) == [[(0, 0, 6)]] and one.fixed == ((1, 5),)
    last = base.select(1, -1)
    assert last is not None and last.fixed == ((1, 7),)


def test_a_slice_to_the_end_stays_whole() -> None:
    cut = View.of((6, 8)).slice(1, 2, 6, to_end=True)
    assert cut is not None and cut.axes[1].parts[0].whole
    assert not View.of((6, 8)).slice(1, 0, 6, to_end=False).axes[1].parts[0].whole  # type: ignore[union-attr]


def test_a_slice_of_everything_is_the_view_itself() -> None:
    base = View.of((6, 8))
    assert base.slice(0, 0, 6, to_end=True) is base


def test_reshapes_merge_and_split_back() -> None:
    base = View.of((2, 3, 4))
    merged = base.reshape((6, 4))
    assert parts(merged) == [[(0, 0, 2), (1, 0, 3)], [(2, 0, 4)]]
    assert merged is not None and parts(merged.reshape((2, 12))) == [[(0, 0, 2)], [(1, 0, 3), (2, 0, 4)]]
    assert base.reshape((4, 6)) is None, "an axis would be cut anew"
    assert base.reshape((2, 12, 2)) is None
    assert merged.slice(0, 1, 2, to_end=False) is None, "part of a merged axis has no stride"
    assert merged.select(0, 1) is None


def test_axes_of_one_come_and_go() -> None:
    base = View.of((5, 1, 3))
    squeezed = base.reshape((5, 3))
    assert squeezed is not None and parts(squeezed) == [[(0, 0, 5)], [(2, 0, 3)]] and squeezed.fixed == ((1, 0),)
    assert parts(squeezed.unsqueeze(1)) == [[(0, 0, 5)], [], [(2, 0, 3)]]
    assert parts(squeezed.permute((1, 0))) == [[(2, 0, 3)], [(0, 0, 5)]]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 2],
        lambda x: x[:, 1:4],
        lambda x: x[:, :3][:, -1],
        lambda x: x[:, 2:],
        lambda x: x.t()[3],
        lambda x: x.transpose(0, 1)[1:3],
        lambda x: x.unbind(1)[4],
        lambda x: x.split(2, 1)[1],
        lambda x: x.split([1, 4, 2], 1)[1],
        lambda x: x.chunk(3, 1)[2],
        lambda x: x.narrow(1, 2, 3),
        lambda x: x.unsqueeze(1)[:, 0, 3:5],
        lambda x: x[:, 2:5].unsqueeze(-1).squeeze(-1).contiguous(),
        lambda x: x.permute(1, 0)[2].reshape(-1, 1).flatten(),
    ],
)
def test_a_described_view_is_what_torch_computes(view: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return view(x) + 1

    x = torch.randint(0, 99, (5, 7))
    module = capture(Model(), (x,)).graph
    normalize(module)
    add = next(node for node in module.graph.nodes if node.target is aten.add.Tensor)
    aliases = Aliases(module.graph)
    value = IndexPrograms(aliases, Segments(module.graph, aliases)).describe(add.args[0])
    assert value.base.op == "placeholder"
    assert torch.equal(_taken(x, value.view), view(x))


def _taken(base: Tensor, view: View) -> Tensor:
    """The view, from its description alone."""
    strides, sizes, offset = [], [], 0
    for dim, index in view.fixed:
        offset += index * base.stride(dim)
    for axis in view.axes:
        assert len(axis.parts) <= 1
        for part in axis.parts:
            offset += part.start * base.stride(part.dim)
            size = static(part.size)
            sizes.append(base.shape[part.dim] - part.start if size is None else size)
            strides.append(base.stride(part.dim))
        if not axis.parts:
            sizes.append(1)
            strides.append(0)
    return base.as_strided(sizes, strides, offset)


def test_sizes() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y.sum()

    module = capture(Model(), (torch.randn(5, 5), torch.randn(5, 5))).graph
    x, y = (node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
    assert static(3) == 3 and static(x.shape[0]) is None
    assert same(x.shape[0], x.shape[0]) and not same(x.shape[0], y.shape[0]), "equal by accident is not equal"
    assert same(product((x.shape[0], 2)), x.shape[0] * 2) and not same(2, 3)


def build(*steps: tuple) -> tuple[Graph, list[Node]]:
    """A graph of calls; an integer argument i that is written as "i" means the i-th node."""
    graph = Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for target, *args in steps:
        nodes.append(graph.call_function(target, tuple(nodes[int(a)] if isinstance(a, str) else a for a in args)))
    graph.output(nodes[-1])
    return graph, nodes


def test_an_edit_reaches_every_view_and_the_base() -> None:
    graph, nodes = build(
        (aten.view.default, "0", [-1]),  # 2
        (aten.select.int, "2", 0, 1),  # 3
        (aten.add_.Tensor, "3", 1),  # 4
        (aten.mul.Tensor, "0", 2),  # 5
        (aten.view.default, "1", [-1]),  # 6
    )
    aliases = Aliases(graph)
    assert [aliases.edited(node) for node in nodes] == [True, False, True, True, True, False, False]


def test_an_out_of_place_operator_makes_new_memory() -> None:
    graph, nodes = build((aten.mul.Tensor, "0", 2), (aten.add_.Tensor, "2", 1))
    aliases = Aliases(graph)
    assert [aliases.edited(node) for node in nodes] == [False, False, True, True]


def test_what_may_pass_its_input_on_shares_memory() -> None:
    """Dropout in eval, and a reshape of what is contiguous, return their input itself."""
    for passing in ((aten.dropout.default, "0", 0.5, False), (aten.reshape.default, "0", [-1])):
        graph, nodes = build(passing, (aten.add_.Tensor, "2", 1))
        assert Aliases(graph).edited(nodes[0]), passing[0]


def test_pure_operators() -> None:
    _, nodes = build(
        (aten.mul.Tensor, "0", 2),
        (aten.add_.Tensor, "0", 1),
        (aten.dropout.default, "0", 0.5, True),
        (aten.rand_like.default, "0"),
    )
    assert [is_pure(node) for node in nodes[2:]] == [True, False, False, False]
    assert [mutates(node) for node in nodes[2:]] == [False, True, False, False]


def test_embedding_renorm_edits_its_table() -> None:
    graph, nodes = build((aten.embedding_renorm_.default, "0", "1", 1.0, 2.0), (aten.embedding.default, "0", "1"))
    aliases = Aliases(graph)
    assert aliases.edited(nodes[0]) and not aliases.edited(nodes[1])
    assert GraphModule(nn.Module(), graph)
