"""Rewrites are transactions: what does not hold leaves no trace, and fuel and names find a wrong one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fxopt.optimize  # noqa: F401
from fxopt import optimize, rewrites
from fxopt.capture import capture
from fxopt.config import Config
from fxopt.findings import PassFindings
from fxopt.normalize import normalize
from fxopt.patterns.core import Match, Reject, Search
from fxopt.rewrites.framework.core import Fuel, Replacement, Rewrite, apply
from fxopt.rewrites.framework.editor import Editor, Rejected

pipeline = __import__("sys").modules["fxopt.optimize"]  # the package's attribute of this name is the function
aten = torch.ops.aten


class Tower(nn.Module):
    """Three ReLUs, each a place that a rewrite can match."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.relu()).relu()).relu()


def graph() -> GraphModule:
    module = capture(Tower(), (torch.randn(5, 4),)).graph
    normalize(module)
    return module


def relus(search: Search) -> Iterator[Match | Reject]:
    for node in search.graph.nodes:
        if node.target is aten.relu.default:
            yield Match(node, {"reads": (node.args[0],)})


def as_clamp(editor: Editor, match: Match) -> Replacement:
    new = editor.call(aten.clamp_min.default, match.anchor.args[0], 0)
    return Replacement({match.anchor: new}, "relu as clamp", "the same values")


def rewrite(replace: Callable[[Editor, Match], Replacement] = as_clamp, name: str = "clamps") -> Rewrite:
    return Rewrite(name, relus, replace, why="a test")


def run(
    replace: Callable[[Editor, Match], Replacement], fuel: Fuel | None = None
) -> tuple[GraphModule, PassFindings, str]:
    module = graph()
    before = str(module.graph)
    return module, apply(rewrite(replace), module, fuel or Fuel(), True), before


def targets(module: GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_every_match_is_replaced() -> None:
    module, findings, _ = run(as_clamp)
    assert targets(module).count(aten.clamp_min.default) == 3
    assert aten.relu.default not in targets(module)
    assert [change.number for change in findings.changes] == [0, 1, 2]
    assert findings.rolled_back == []
    module.graph.lint()


def wrong_shape(editor: Editor, match: Match) -> Replacement:
    new = editor.call(aten.unsqueeze.default, match.anchor.args[0], 0)
    return Replacement({match.anchor: new}, "", "")


def wrong_dtype(editor: Editor, match: Match) -> Replacement:
    new = editor.call(aten.to.dtype, match.anchor.args[0], torch.float64)
    return Replacement({match.anchor: new}, "", "")


def raises(editor: Editor, match: Match) -> Replacement:
    as_clamp(editor, match)
    raise ZeroDivisionError("a bug in a rewrite")


def refuses(editor: Editor, match: Match) -> Replacement:
    editor.constant("table", torch.ones(3))
    raise Rejected("not here")


def impossible(editor: Editor, match: Match) -> Replacement:
    """No operator takes these."""
    return Replacement({match.anchor: editor.call(aten.mm.default, match.anchor.args[0], match.anchor.args[0])}, "", "")


def needs_a_guard(editor: Editor, match: Match) -> Replacement:
    source = match.anchor.args[0]
    assert isinstance(source, Node)
    if source.meta["val"].shape[0] == 5:  # the capture's batch size, by accident
        return as_clamp(editor, match)
    raise Rejected("another batch size")


FAILURES = {
    wrong_shape: "expected torch.float32",
    wrong_dtype: "found torch.float64",
    raises: "ZeroDivisionError: a bug in a rewrite",
    refuses: "not here",
    impossible: "same reduction dim",
    needs_a_guard: "only for some input sizes",
}


BUGS = (raises, impossible)  # anything but a Rejected is one, and is reported as rolled back


@pytest.mark.parametrize("replace", FAILURES)
def test_a_failing_replacement_leaves_the_graph_as_it_was(replace: Callable[[Editor, Match], Replacement]) -> None:
    module, findings, before = run(replace)
    assert str(module.graph) == before
    assert findings.changes == []
    reasons = [miss.reason for miss in findings.misses] + [change.why for change in findings.rolled_back]
    assert reasons and all(FAILURES[replace] in reason for reason in reasons)
    assert (findings.rolled_back != []) == (replace in BUGS)
    module.graph.lint()


def test_no_value_is_read_before_it_is_computed() -> None:
    def late(editor: Editor, match: Match) -> Replacement:
        editor.point = editor.module.graph.output_node()
        return as_clamp(editor, match)

    module, findings, _ = run(late)
    assert [change.number for change in findings.changes] == [2]  # of which only the output is
    assert [miss.reason for miss in findings.misses] == [
        "'relu' is read by 'linear' before it could be computed",
        "'relu_1' is read by 'linear_1' before it could be computed",
    ]
    module.graph.lint()


def test_a_failing_replacement_moves_nodes_back() -> None:
    def hoists(editor: Editor, match: Match) -> Replacement:
        nodes = list(editor.module.graph.nodes)
        later = [node for node in nodes[nodes.index(match.anchor) + 1 :] if node.op == "call_function"]
        editor.hoist(later[:1])
        raise Rejected("after a move")

    module, _, before = run(hoists)
    assert str(module.graph) == before


@pytest.mark.parametrize("limit", [0, 1, 2, 3, None])
def test_fuel(limit: int | None) -> None:
    module, findings, _ = run(as_clamp, Fuel(limit))
    assert len(findings.changes) == (3 if limit is None else limit)
    assert targets(module).count(aten.clamp_min.default) == len(findings.changes)


def test_skipped_rewrites_keep_their_numbers() -> None:
    module, findings, _ = run(as_clamp, Fuel(None, frozenset({1})))
    assert [(change.number, change.site) for change in findings.changes] == [(0, "relu"), (2, "relu_2")]
    assert targets(module).count(aten.relu.default) == 1


def test_a_match_on_a_replaced_node_is_dropped() -> None:
    def twice(search: Search) -> Iterator[Match | Reject]:
        for match in relus(search):
            yield match
            yield match  # type: ignore[misc]

    module = graph()
    findings = apply(Rewrite("twice", twice, as_clamp, ""), module, Fuel(), True)
    assert len(findings.changes) == 3


def columns(model: nn.Module) -> PassFindings:
    return next(ran for ran in model._fxopt.findings[0].passes if ran.name == "embedding_columns")  # type: ignore[union-attr]


class Columns(nn.Module):
    """Two columns that cannot share a call: the second's ids come from the first's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.first(ids % 20)
        return self.second((rows.sum(1) * 100).long() % 20)


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (2, 2), (None, 2)])
def test_max_rewrites(limit: int | None, expected: int) -> None:
    model, ids = Columns(), torch.randint(0, 99, (6,))
    fast = pipeline.optimize(model, (ids,), Config(max_rewrites=limit))
    assert len(columns(fast).changes) == expected
    assert torch.equal(fast(ids), model(ids))


def test_a_disabled_pass_does_not_run() -> None:
    fast = pipeline.optimize(Columns(), (torch.arange(6),), Config(disable=("embedding_columns",)))
    names = [ran.name for ran in fast._fxopt.findings[0].passes]
    assert "embedding_columns" not in names and names


def scaled(editor: Editor, match: Match) -> Replacement:
    """Right shape, right dtype, wrong numbers."""
    new = editor.call(aten.mul.Tensor, editor.call(aten.relu.default, match.anchor.args[0]), 1.01)
    return Replacement({match.anchor: new}, "a wrong relu", "")


def only_the_second(search: Search) -> Iterator[Match | Reject]:
    yield from list(relus(search))[1:2]


@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_rewrite_is_rolled_back_and_named(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    wrong = Rewrite("wrong", only_the_second, _once(scaled), "")
    right = rewrite()
    monkeypatch.setattr(rewrites, "PASSES", (wrong, right) if first else (right_but_second(), wrong))
    model, x = Tower(), torch.randn(7, 4)
    fast = pipeline.optimize(model, (x,))
    findings = fast._fxopt.findings[0]
    by_name = {ran.name: ran for ran in findings.passes}
    assert findings.eager_reason == ""
    assert by_name["wrong"].changes == []
    assert [change.what for change in by_name["wrong"].rolled_back] == ["a wrong relu"]
    assert "budget" in by_name["wrong"].rolled_back[0].why
    assert by_name["clamps"].changes
    torch.testing.assert_close(fast(x), model(x))


def right_but_second() -> Rewrite:
    """Leaves a ReLU for the wrong rewrite to find."""

    def first(search: Search) -> Iterator[Match | Reject]:
        yield from (match for match in relus(search) if match.anchor.name == "relu")  # type: ignore[union-attr]

    return Rewrite("clamps", first, as_clamp, "")


def _once(replace: Callable[[Editor, Match], Replacement]) -> Callable[[Editor, Match], Replacement]:
    """Marks what it made, so that the pass comes to its fixed point."""

    def once(editor: Editor, match: Match) -> Replacement:
        if match.anchor.meta.get("made"):
            raise Rejected("made by this rewrite")
        replacement = replace(editor, match)
        for node in editor.added:
            node.meta["made"] = True
        return replacement

    return once


def test_two_wrong_rewrites_are_both_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Rewrite("wrong", relus, _once(scaled), "")
    monkeypatch.setattr(rewrites, "PASSES", (wrong,))
    model, x = Tower(), torch.randn(7, 4)
    fast = pipeline.optimize(model, (x,))
    _, ran = fast._fxopt.findings[0].passes  # after normalization
    assert ran.changes == []
    assert len({change.number for change in ran.rolled_back if change.what == "a wrong relu"}) == 3
    torch.testing.assert_close(fast(x), model(x))


class TeacherAndStudent(nn.Module):
    """A tower without gradients, whose last step, the sigmoid, has gradients on; and one beside it that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
        self.student = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x) * taught.sigmoid()


def test_no_rewrite_gives_gradients_to_what_has_none() -> None:
    model = TeacherAndStudent()
    x = torch.randn(5, 3, requires_grad=True)
    fast = optimize(copy.deepcopy(model), (x,), Config(tune="off"))
    assert not fast._fxopt.findings[0].eager_reason

    def gradients(of: nn.Module) -> tuple:
        return torch.autograd.grad(of(x).square().sum(), [x, *of.parameters()], allow_unused=True)

    for found, expected in zip(gradients(fast), gradients(model), strict=True):
        assert (found is None) == (expected is None)
        torch.testing.assert_close(found, expected)
