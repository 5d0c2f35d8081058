"""Verification at made-up sizes: what is wrong elsewhere than in the call is found, and by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import rewrites, stages
from fxopt.capture import capture
from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.patterns.core import Match, Reject, Search
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.verify import Examples

aten = torch.ops.aten


class Layers(nn.Module):
    """Three places for a rewrite; only the second is met by the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.relu()).relu()).relu()


class Averages(nn.Module):
    """The same places, [B, L]."""

    def forward(self, x: Tensor) -> Tensor:
        y = ((x + 1).relu() * 2 + x).relu()
        return (y / x.shape[1]).relu()


def relus(second: bool) -> Callable[[Search], Iterator[Match | Reject]]:
    def find(search: Search) -> Iterator[Match | Reject]:
        found = [node for node in search.graph.nodes if node.target is aten.relu.default and "made" not in node.meta]
        for node in found:
            if (node.name == "relu_1") == second:
                yield Match(node, {"reads": (node.args[0],)})

    return find


def planted(change: Callable[[Editor, Match], object]) -> Rewrite:
    def replace(editor: Editor, match: Match) -> Replacement:
        if match.anchor.meta.get("made"):
            raise Rejected("made by this rewrite")
        new = editor.call(aten.relu.default, change(editor, match))
        for node in editor.added:
            node.meta["made"] = True
        return Replacement({match.anchor: new}, "a wrong relu", "")

    return Rewrite("wrong", relus(second=True), replace, "")


def as_clamp(editor: Editor, match: Match) -> Replacement:
    return Replacement({match.anchor: editor.call(aten.clamp_min.default, match.anchor.args[0], 0)}, "a clamp", "")


def rows_in_reverse(editor: Editor, match: Match) -> object:
    return editor.call(aten.flip.default, match.anchor.args[0], [0])


def scrambled(editor: Editor, match: Match) -> object:
    turned = editor.call(aten.transpose.int, match.anchor.args[0], 0, 1)
    return editor.call(aten.reshape.default, turned, [-1, 6])


def last_row(editor: Editor, match: Match) -> object:
    last = editor.call(aten.select.int, match.anchor.args[0], 0, -1)
    return editor.call(aten.expand_as.default, last, match.anchor.args[0])


def scaled_by_the_other_size(editor: Editor, match: Match) -> object:
    x = match.anchor.args[0]
    rows, columns = (
        editor.call(aten.sum.default, editor.call(aten.ones_like.default, editor.call(aten.select.int, x, d, 0)))
        for d in (1, 0)
    )
    return editor.call(aten.mul.Tensor, x, editor.call(aten.div.Tensor, rows, columns))


PLANTED = {
    "batch 1": (rows_in_reverse, Layers(), torch.randn(1, 4)),
    "scrambled at batch 1": (scrambled, Layers(), torch.randn(1, 4)),
    "the last row of one": (last_row, Layers(), torch.randn(1, 4)),
    "batch 0": (rows_in_reverse, Layers(), torch.randn(0, 4)),
    "copies of one row": (rows_in_reverse, Layers(), torch.randn(1, 4).expand(7, 4)),
    "zeros": (rows_in_reverse, Layers(), torch.zeros(9, 4)),
    "two sizes coincide": (scaled_by_the_other_size, Averages(), torch.randn(8, 8)),
    "the batch is a layer's width": (scaled_by_the_other_size, Layers(), torch.randn(6, 4)),
}


@pytest.mark.parametrize("case", PLANTED)
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_right_for_the_call_alone_is_taken_back_by_name(
    monkeypatch: pytest.MonkeyPatch, case: str, grad: bool
) -> None:
    change, model, x = PLANTED[case]
    right = Rewrite("clamps", relus(second=False), as_clamp, "")
    monkeypatch.setattr(rewrites, "PASSES", (right, planted(change)))
    with torch.set_grad_enabled(grad):
        fast = fxopt.optimize(model, (x,), Config(tune="off"))
        found = fast._fxopt.findings[0]
        by_name = {ran.name: ran for ran in found.passes}
        assert not found.eager_reason and found.witness
        assert by_name["wrong"].changes == [] and [c.what for c in by_name["wrong"].rolled_back] == ["a wrong relu"]
        assert by_name["wrong"].rolled_back[0].why.startswith(f"at sizes {found.witness}: output 0: ")
        assert len(by_name["clamps"].changes) == 2
        other = torch.randn(11, x.shape[1])
        torch.testing.assert_close(fast(other), model(other))


def test_a_rewrite_that_is_wrong_in_a_repetition_alone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is close may refuse in one of several rewritings what it applied in another."""
    change, model, x = PLANTED["two sizes coincide"]
    monkeypatch.setattr(rewrites, "PASSES", (planted(change),))
    blamed, times = Findings.blame, iter([True])

    def once_unnamed(findings: Findings, number: int) -> list:
        return [] if next(times, False) else blamed(findings, number)

    monkeypatch.setattr(Findings, "blame", once_unnamed)
    with torch.no_grad():
        fast = fxopt.optimize(model, (x,), Config(tune="off"))
        assert not fast._fxopt.findings[0].eager_reason and fast._fxopt.findings[0].rewrites
        other = torch.randn(11, 8)
        torch.testing.assert_close(fast(other), model(other))


def test_a_graph_that_is_wrong_only_at_times_ends_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no rewrite can be named, however often one is looked for."""
    change, model, x = PLANTED["two sizes coincide"]
    monkeypatch.setattr(rewrites, "PASSES", (planted(change),))
    monkeypatch.setattr(stages, "bisect", lambda verdict_with, rewrites: -1)
    with torch.no_grad():
        fast = fxopt.optimize(model, (x,), Config(tune="off"))
        assert "differ" in fast._fxopt.findings[0].eager_reason
        torch.testing.assert_close(fast(x), model(x))


def test_a_call_that_can_tell_is_not_compared_twice() -> None:
    model, x = Layers(), torch.randn(7, 4)
    captured = capture(model, (x,))
    told = Examples(captured, model, (x,), {}, Config())
    assert not told.witness and len(told.comparisons) == 1
    untold = Examples(captured, model, (x[:1],), {}, Config())
    assert untold.witness and len(untold.comparisons) == 2


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 3) for rows in (9, 40, 1000))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)], 1)


class Bags(nn.Module):
    def __init__(self, ends: bool = False, mode: str = "sum") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 3, mode=mode, include_last_offset=ends)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([dense, self.bag(ids, offsets)], 1)


class Lengths(Bags):
    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(dense, ids, lengths.cumsum(0) - lengths)


class Jagged(nn.Module):
    """As a KeyedJaggedTensor: lengths of two features, one after the other, share one row of values out."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 3) for rows in (30, 500))

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        each = lengths.view(2, -1)
        first, second = each.sum(1).tolist()
        parts = values.split([first, second])
        starts = each.cumsum(1) - each
        return torch.cat([bag(p, s) for bag, p, s in zip(self.bags, parts, starts.unbind(0), strict=True)], 1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (self.table(ids) * mask.unsqueeze(-1)).sum(1) / (mask.sum(1, keepdim=True) + 1)


class Padded(Masked):
    """Lengths of padded sequences."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(ids, (torch.arange(ids.shape[1])[None] < lengths[:, None]).float())


class Last(nn.Module):
    """Of each sequence the row at its last position, which other lengths may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        last = self.table(ids).gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, -1, 4)).squeeze(1)
        return last + self.table(ids).mean(1)


class Packed(nn.Module):
    """Ids as floats beside dense values."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 3) for rows in (9, 400))

    def forward(self, x: Tensor) -> Tensor:
        rows = [table(x[:, k : k + 1].long()).squeeze(1) for k, table in enumerate(self.tables)]
        return torch.cat([*rows, x[:, 2:].log1p()], 1)


class Attends(nn.Module):
    """One input is compared with each of another's rows: three sizes."""

    def forward(self, query: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
        scores = (query @ keys.transpose(1, 2)).masked_fill(~allowed, -1e9)
        return scores.softmax(-1) @ keys


class Choosy(nn.Module):
    """Eager refuses sizes that part, and nothing was asked of them before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(4.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x.sum(1) + y.sum(1), "outer": x[:, :1] * self.order}


@torch.library.custom_op("fxopt_tests::halves", mutates_args=())
def halves(x: Tensor) -> Tensor:
    return x / 2


@halves.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OfOthers(Ids):
    """An operator of others that reads no integers."""

    def forward(self, ids: Tensor) -> Tensor:
        return halves(super().forward(ids))


def ids(*shape: int, below: int = 9) -> Tensor:
    return torch.randint(0, below, shape)


MADE: dict[str, tuple[nn.Module, tuple]] = {
    "ids of one row": (Ids(), (torch.tensor([[3, 0, 999]]),)),
    "ids of no row": (Ids(), (ids(0, 3),)),
    "ids that are all 0": (Ids(), (torch.zeros(4, 3, dtype=torch.int64),)),
    "one bag": (Bags(), (torch.randn(1, 2), ids(5), torch.tensor([0]))),
    "as many ids as bags": (Bags(mode="mean"), (torch.randn(4, 2), ids(4), torch.arange(4))),
    "empty bags": (Bags(mode="max"), (torch.randn(3, 2), ids(3), torch.tensor([0, 0, 3]))),
    "bags with an end": (Bags(ends=True), (torch.randn(1, 2), ids(5), torch.tensor([0, 5]))),
    "lengths of one bag": (Lengths(), (torch.randn(1, 2), ids(5), torch.tensor([5]))),
    "lengths of 1": (Lengths(), (torch.randn(7, 2), ids(7), torch.ones(7, dtype=torch.int64))),
    "jagged, one row": (Jagged(), (ids(5), torch.tensor([3, 2]))),
    "jagged, as many values as lengths": (Jagged(), (ids(6), torch.tensor([2, 0, 1, 1, 2, 0]))),
    "a mask of ones": (Masked(), (ids(1, 5), torch.ones(1, 5))),
    "a mask of bools": (Masked(), (ids(5, 5), torch.rand(5, 5) < 0.5)),
    "padded lengths": (Padded(), (ids(1, 8), torch.tensor([8]))),
    "last positions": (Last(), (ids(4, 50), torch.tensor([50, 49, 50, 48]))),
    "ids as floats": (Packed(), (torch.tensor([[3.0, 399.0, 0.25, 17.5]]),)),
    "three equal sizes": (Attends(), (torch.randn(4, 4, 2), torch.randn(4, 4, 2), torch.ones(4, 4, 4).bool())),
    "sizes that must coincide": (Choosy(), (torch.randn(1, 3), torch.randn(1, 5))),
    "an operator of others": (OfOthers(), (torch.tensor([[3, 0, 999]]),)),
}


@pytest.mark.parametrize("case", MADE)
@torch.no_grad()
def test_inputs_are_made_at_sizes_that_can_tell(case: str) -> None:
    model, inputs = MADE[case]
    captured = capture(model, inputs)
    examples = Examples(captured, model, inputs, {}, Config())
    assert examples.witness and not examples.untold and examples.guards is captured.guards
    _, made = examples.comparisons
    numbers = [int(part.split("=")[1]) for part in examples.witness.split(", ")]
    assert len(set(numbers)) == len(numbers) and min(numbers) > 1
    assert captured.guards.holds(made.setting.inputs)
    for new, old in zip(made.setting.inputs, inputs, strict=True):
        assert new.dtype == old.dtype and new.dim() == old.dim()
        assert not torch.equal(new, new[:1].expand_as(new)), "copies of one row"
    fast = fxopt.optimize(model, inputs, Config(tune="off"))
    found = fast._fxopt.findings[0]
    assert not found.eager_reason and found.witness == examples.witness
    assert not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    assert "at made-up sizes" in " ".join(str(fxopt.report(fast)).split())


class Pooled(nn.Module):
    """Lengths that an operator of others trusts."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 3)

    def forward(self, x: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return self.top(x).relu() + trusted(values, lengths).unsqueeze(1)


@torch.library.custom_op("fxopt_tests::trusted", mutates_args=())
def trusted(values: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([bag.sum() for bag in values.split(lengths.tolist())])


@trusted.register_fake
def _(values: Tensor, lengths: Tensor) -> Tensor:
    return values.new_empty(lengths.shape)


class Strange(nn.Module):
    """Offsets that are made of nothing that looks like them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 3)

    def forward(self, ids: Tensor, marks: Tensor) -> Tensor:
        return self.bag(ids, (marks.cumsum(0) - marks) // 1000)


class Narrow(nn.Module):
    """Eager refuses whatever is not the call."""

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        return torch.nn.functional.embedding(key - 123456, torch.eye(1, 4)) + x


UNTOLD: dict[str, tuple[nn.Module, tuple, tuple, str]] = {
    "an operator of others": (
        Pooled(),
        (torch.randn(1, 4), torch.randn(3), torch.tensor([3])),
        (torch.randn(2, 4), torch.randn(5), torch.tensor([3, 2])),
        r"fxopt_tests\.trusted\.default \(test_verify_witness\.py:\d+\) reads inputs of size s\d+, and might crash",
    ),
    "strange offsets": (
        Strange(),
        (ids(1), torch.tensor([1500])),
        (ids(4), torch.tensor([1500, 2000])),
        r"aten\.embedding_bag\.\w+ \(bag at test_verify_witness\.py:\d+\) reads inputs of size s\d+, and might crash",
    ),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_where_nothing_can_be_made_up_a_graph_is_for_the_sizes_that_were_compared(case: str) -> None:
    model, inputs, others, reason = UNTOLD[case]
    fast = fxopt.optimize(model, inputs, Config(tune="off"))
    found = fast._fxopt.findings[0]
    assert not found.witness and not found.eager_reason
    assert "only the call's own sizes were compared with eager" in found.untold
    assert re.search(reason, found.untold), found.untold
    said = " ".join(str(fxopt.report(fast)).split())
    assert "only the call's own sizes were compared with eager" in said and "=1" in said
    assert "A first call whose sizes are above 1" in said
    torch.testing.assert_close(fast(*others), model(*others))
    assert len(fast._fxopt.findings) == 2, "captured, and compared, by itself"
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert len(fast._fxopt.findings) == 2


def test_sizes_that_coincide_remain_equal_where_nothing_can_be_made_up() -> None:
    model = Pooled()

    def call(rows: int, values: int) -> tuple:
        return torch.randn(rows, 4), torch.randn(values), torch.tensor([1] * (rows - 1) + [values - rows + 1])

    with torch.no_grad():
        fast = fxopt.optimize(model, call(7, 7), Config(tune="off"))
        for rows, values, captures in ((7, 7, 1), (9, 9, 1), (5, 8, 2), (8, 8, 2)):
            inputs = call(rows, values)
            torch.testing.assert_close(fast(*inputs), model(*inputs))
            assert len(fast._fxopt.findings) == captures


def test_values_that_eager_refuses_are_no_witness() -> None:
    model, inputs = Narrow(), (torch.randn(1, 4), torch.tensor([123456]))
    examples = Examples(capture(model, inputs), model, inputs, {}, Config())
    assert examples.witness, "the rows of the call, more than once"
    assert bool((examples.comparisons[1].setting.inputs[1] == 123456).all())


def test_a_capture_that_is_wrong_at_other_sizes_is_turned_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rewrite is to blame."""
    model, x = Layers(), torch.randn(1, 4)
    captured = capture(model, (x,))
    relu = next(node for node in captured.graph.graph.nodes if node.target is aten.relu.default)
    with captured.graph.graph.inserting_before(relu):
        relu.args = (captured.graph.graph.call_function(aten.flip.default, (relu.args[0], [0])),)
    captured.graph.recompile()
    examples = Examples(captured, model, (x,), {}, Config())
    verdict = examples.verdict(fxopt.runtime.Executable(captured, captured.graph.forward))
    assert not verdict.ok and not verdict.capture_ok
    assert verdict.message.startswith(f"at sizes {examples.witness}: the captured graph, before any rewrite: output 0")


@pytest.mark.parametrize("level", ["first", "full"])
def test_the_model_and_the_random_state_are_left_alone(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).train()
    x, before = torch.randn(6, 4), {name: t.clone() for name, t in model.state_dict().items()}
    captured = capture(model, (x,))
    draws = torch.get_rng_state()
    examples = Examples(captured, model, (x,), {}, Config(verify=level))
    assert examples.witness and examples.verdict(fxopt.runtime.Executable(captured, captured.graph.forward)).ok
    assert torch.equal(draws, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
