"""Timings decide: what is slower is refused, what is faster at some sizes runs at those, and timings are remembered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.patterns.core import Match, Reject, Search
from fxopt.rewrites.framework.core import Fuel, Replacement, Rewrite, apply
from fxopt.rewrites.framework.editor import Editor
from fxopt.rewrites.framework.policy import MEASURED
from fxopt.runtime import dispatcher_of
from fxopt.tune import samples
from fxopt.tune import tuner as tuner_module
from fxopt.tune.memory import Memory
from fxopt.tune.tuner import Disagreement, Effort, Tuner, Unfit, Verdict

aten = torch.ops.aten
pytestmark = pytest.mark.timed


class Norm(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x * w).relu() + 1.0


def sleeping(x: Tensor, few: float, many: float) -> Tensor:
    time.sleep(few if x.shape[0] <= 16 else many)
    return x + 1.0


def relus(search: Search) -> Iterator[Match | Reject]:
    for node in search.calls(aten.relu.default):
        yield Match(node, {})


def as_clamp(editor: Editor, match: Match) -> Replacement:
    new = editor.call(aten.clamp_min.default, match.anchor.args[0], 0)
    return Replacement({match.anchor: new}, "relu as clamp", "the same values")


class FixedTimes(Tuner):
    """As if the ratios had been timed."""

    def __init__(self, ratios: dict[int, float], memory: Path) -> None:
        super().__init__("fast", Memory(memory))
        self.ratios = ratios
        self.sites: list[Any] = []

    def verdict(self, site: Any) -> Verdict:
        self.sites.append(site)
        return Verdict(self.ratios)


def rewritten(
    ratios: dict[int, float], folder: Path, model: nn.Module | None = None, match: Any = relus, replace: Any = as_clamp
) -> tuple[GraphModule, Any, FixedTimes]:
    module = capture(model or Norm(), (torch.randn(5, 4), torch.randn(4))).graph
    normalize(module)
    tuner = FixedTimes(ratios, folder / "t.json")
    findings = apply(Rewrite("clamps", match, replace, "", policy=MEASURED), module, Fuel(), True, tuner)
    module.recompile()
    return module, findings, tuner


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_what_is_slower_is_refused_with_its_timing(tmp_path: Path) -> None:
    module, findings, _ = rewritten({1: 0.5, 256: 0.9}, tmp_path)
    assert aten.relu.default in targets(module) and not findings.changes
    assert "slower on this machine: 0.50x at 1, 0.90x at 256 rows" in findings.misses[0].reason


def test_what_is_faster_is_applied_and_says_so(tmp_path: Path) -> None:
    module, findings, _ = rewritten({1: 0.99, 256: 1.5}, tmp_path)
    assert aten.relu.default not in targets(module)
    assert "1.50x at 256 rows" in findings.changes[0].why


@pytest.mark.parametrize(("ratio", "changes"), [(0.5, 0), (2.0, 2)])
def test_what_there_is_no_time_for_is_judged_as_the_last(tmp_path: Path, ratio: float, changes: int) -> None:
    class OutOfTime(FixedTimes):
        def verdict(self, site: Any) -> Verdict:
            self.sites.append(site)
            return Verdict({}, "no time") if len(self.sites) > 1 else Verdict({1: ratio})

    module = capture(Twice(lambda x: x + 1), (torch.randn(5, 4), torch.randn(4))).graph
    tuner = OutOfTime({}, tmp_path / "t.json")
    findings = apply(Rewrite("clamps", relus, as_clamp, "", policy=MEASURED), module, Fuel(), True, tuner)
    assert len(findings.changes) == changes and len(tuner.sites) == 2
    assert changes or findings.misses[1].reason == (
        "no time, and the one that was timed last would be slower: 0.50x at 1 rows"
    )


@pytest.mark.parametrize("batch", [0, 1, 16, 17, 300])
def test_what_is_faster_at_some_sizes_runs_at_those(tmp_path: Path, batch: int) -> None:
    module, findings, _ = rewritten({1: 0.5, 16: 0.8, 17: 2.0, 256: 2.0}, tmp_path)
    assert "above 16 rows" in findings.changes[0].why
    x, w = torch.randn(batch, 4), torch.randn(4)
    assert torch.equal(module(x, w)[0], Norm()(x, w))


class Twice(nn.Module):
    """The second relu reads what others read, too, of the first: a view, or something computed."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = (x * w).relu()
        between = self.between(first)
        return between.relu(), between, first


def both_relus(search: Search) -> Iterator[Match | Reject]:
    first, second = search.calls(aten.relu.default)
    yield Match(first, {"second": second})


def as_one_clamp(editor: Editor, match: Match) -> Replacement:
    new = editor.call(aten.clamp_min.default, match.anchor.args[0], 0)
    viewed = editor.call(aten.unsqueeze.default, new, 1)
    return Replacement({match.anchor: new, match.bound["second"]: viewed}, "relus as a clamp", "the same values")


@pytest.mark.parametrize("batch", [0, 1, 16, 17, 300])
def test_a_view_between_two_parts_belongs_to_both_ways(tmp_path: Path, batch: int) -> None:
    model = Twice(lambda x: x.unsqueeze(1))
    module, findings, _ = rewritten({1: 0.5, 256: 2.1}, tmp_path, model, both_relus, as_one_clamp)
    assert "above 15 rows" in findings.changes[0].why
    x, w = torch.randn(batch, 4), torch.randn(4)
    results = module(x, w)
    for found, expected in zip(results, model(x, w), strict=True):
        assert torch.equal(found, expected)
    assert results[1].data_ptr() == results[2].data_ptr(), "it stays a view of what others read"


@pytest.mark.parametrize(("ratios", "changes"), [({1: 0.5, 256: 2.1}, 1), ({1: 0.5, 256: 1.9}, 0)])
def test_what_cannot_be_picked_by_rows_has_to_gain_more_than_it_loses(
    tmp_path: Path, ratios: dict[int, float], changes: int
) -> None:
    model = Twice(lambda x: (x + 0.0).unsqueeze(1))
    _, findings, _ = rewritten(ratios, tmp_path, model, both_relus, as_one_clamp)
    assert len(findings.changes) == changes
    assert changes or "lose more on this machine than it gains: 0.50x at 1" in findings.misses[0].reason


def test_the_regions_are_what_goes_and_what_comes(tmp_path: Path) -> None:
    _, _, tuner = rewritten({1: 2.0}, tmp_path)
    (site,) = tuner.sites
    x = torch.randn(3, 4)
    assert len(site.values) == 1, "the product stays: the clamp reads it"
    assert torch.equal(site.before(x)[0], x.relu()) and torch.equal(site.after(x)[0], x.clamp_min(0))


def site_of(before: Callable, after: Callable, key: str | None = "key", rows: int = 5) -> Any:
    from fxopt.tune.tuner import Site

    module = capture(Norm(), (torch.randn(rows, 4), torch.randn(4))).graph
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return Site(lambda x, w: before(x), lambda x, w: after(x), values, key, training=False)


def test_timing_sees_the_faster_one_by_batch(tmp_path: Path) -> None:
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    tuner.effort = Effort((1, 36), 10.0, 0.0)
    verdict = tuner.verdict(site_of(lambda x: sleeping(x, 1e-3, 1e-3), lambda x: sleeping(x, 4e-3, 0.0)))
    assert verdict.ratios[1] < 0.5 < 2 < verdict.ratios[36] and verdict.mixed
    most, few = verdict.split()
    assert 1 <= most <= 4 and not few, "the old one up to 3 rows, the new one above"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({1: 0.97, 16: 2.44, 256: 2.13, 4096: 0.95}, (3435, True)),
        ({1: 0.5, 36: 2.0}, (6, False)),
        ({1: 4.0, 16: 1.0, 256: 0.25}, (16, True)),
        ({1: 1.0, 16: 1.0}, (4, True)),
    ],
)
def test_a_cut_stands_where_gains_end(ratios: dict[int, float], expected: tuple[int, bool]) -> None:
    assert Verdict(ratios).split() == expected


def test_timings_are_remembered_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "_RAN", 0.0)  # however busy this machine is
    monkeypatch.setattr(tuner_module.Neighbours, "crowding", lambda self: "")
    first = Tuner("fast", Memory(tmp_path / "t.json"))
    ratios = first.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios
    first.memory.save()
    later = Tuner("fast", Memory(tmp_path / "t.json"))
    later.left = 0
    assert later.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios == ratios
    assert "Config(tune='full')" in later.verdict(site_of(lambda x: x + 1, lambda x: x + 2, key=None)).reason


def test_timings_of_threads_without_cores_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "_RAN", 0.0)
    monkeypatch.setattr(tuner_module.Neighbours, "crowding", lambda self: "others used both cores")
    first = Tuner("fast", Memory(tmp_path / "t.json"))
    assert first.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios
    later = Tuner("fast", first.memory)
    later.left = 0
    assert not later.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios


def test_timings_of_a_busy_machine_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "_RAN", math.inf)
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    assert tuner.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios
    tuner.save()
    assert not (tmp_path / "t.json").exists()
    tuner.left = 0
    assert not tuner.verdict(site_of(lambda x: x + 1, lambda x: x + 2)).ratios


@pytest.mark.parametrize("text", ['{"key": {"1": 2.0', '{"key": {"1": null}}', '{"key": {"1": [2.0]}}', "[1]"])
def test_a_broken_memory_is_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    memory = Memory(tmp_path / "t.json")
    assert memory.get("key") is None
    memory.put("key", {1: 3.0})
    memory.save()
    assert Memory(tmp_path / "t.json").get("key") == {1: 3.0}


def test_the_budget_ends(tmp_path: Path) -> None:
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    tuner.left = 1e-9
    assert tuner.verdict(site_of(lambda x: x + 1, lambda x: x + 2, key="a")).ratios
    assert not tuner.verdict(site_of(lambda x: x + 1, lambda x: x + 2, key="b")).ratios


def test_a_size_that_would_outlast_the_budget_is_not_timed(tmp_path: Path) -> None:
    """What the others say is not remembered: another process has time for all."""
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    tuner.left = 0.9
    site = site_of(lambda x: sleeping(x, 0.01, 0.04), lambda x: sleeping(x, 0.01, 0.04), key="a")
    assert set(tuner.verdict(site).ratios) == {1, 16}, "64 rows take 0.04 s, which tell of 0.16 for 256"
    assert tuner.left > 0
    tuner.save()
    assert not (tmp_path / "t.json").exists()


def test_a_first_size_that_would_outlast_the_budget_is_not_timed(tmp_path: Path) -> None:
    tuner, called = Tuner("fast", Memory(tmp_path / "t.json")), set[int]()

    def slow(x: torch.Tensor) -> torch.Tensor:
        called.add(x.shape[0])
        time.sleep(1e-3 * x.shape[0])
        return x

    verdict = tuner.verdict(replace(site_of(slow, slow), rows=(1024, 4096)))
    assert not verdict.ratios and "a run of 1024 rows takes about 1." in verdict.reason
    assert called == {64}


def test_what_grows_with_the_square_of_the_batch_is_not_timed_where_it_is_long(tmp_path: Path) -> None:
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    tuner.effort = Effort((4, 64), 10.0, 0.0)
    called = set[int]()

    def of_square(x: torch.Tensor) -> torch.Tensor:
        called.add(x.shape[0])
        time.sleep(2e-3 + 2e-4 * x.shape[0] ** 2)
        return x

    assert set(tuner.verdict(site_of(of_square, of_square)).ratios) == {4}
    assert called == {4, 16}, "64 rows would take 0.8 s; 4 rows, 5 ms, tell of 80 ms"
    assert set(tuner.verdict(site_of(lambda x: sleeping(x, 0.0, 1e-3), torch.relu, "line")).ratios) == {4, 64}


def test_answers_that_differ_at_large_sizes_are_told(tmp_path: Path) -> None:
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    site = replace(site_of(lambda x: (x + 1,), lambda x: (x + 1 if x.shape[0] < 1024 else x,)), rows=(1024,))
    with pytest.raises(Disagreement, match="1024 rows"):
        tuner.verdict(site)


def test_sizes_that_the_captured_operators_refuse_are_no_error_of_the_new_ones(tmp_path: Path) -> None:
    """B * L rows over B, which is no symbol of the region: at 1 row there is no L."""
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    refusing = site_of(lambda x: x.view(5, -1, x.shape[1]), torch.relu, "refusing", rows=35)
    assert set(tuner.verdict(refusing).ratios) == {35}
    with pytest.raises(Unfit, match="its own operators refuse"):
        tuner.verdict(replace(refusing, key="chunks", rows=(1024,)))
    with pytest.raises(Unfit, match="its own operators refuse"):
        tuner.verdict(site_of(lambda x: x.view(4, -1, x.shape[1]), torch.relu, "never", rows=35))


def test_lengths_are_no_zeros_where_a_length_has_a_last_position(tmp_path: Path) -> None:
    """Lengths that are made up are 0 or 1 first, and a GPU's `gather` at -1 ends the process (RecBole's STAMP)."""

    def last(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.gather(1, (lengths - 1)[:, None, None].expand(-1, -1, x.shape[2]))

    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    site = site_of(torch.relu, torch.relu, "last")
    batch = site.values[0].shape[0]
    with site.values[0].fake_mode:
        values = [torch.empty(batch, 5, 4), torch.empty(batch, dtype=torch.int64)]
    assert set(tuner.verdict(replace(site, before=last, after=last, values=values)).ratios) == {1, 16, 256, 4096}


def test_sizes_whose_inputs_would_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_BYTES", 4 * 4 * 20)
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    assert set(tuner.verdict(site_of(torch.relu, torch.relu)).ratios) == {1, 16}
    monkeypatch.setattr(samples, "_MOST_BYTES", 4)
    assert "its inputs take" in str(tuner.verdict(site_of(torch.relu, torch.relu, "none")))


def test_masks_are_compared(tmp_path: Path) -> None:
    tuner = Tuner("fast", Memory(tmp_path / "t.json"))
    same = replace(site_of(lambda x: (x > 0,), lambda x: (x.gt(0),), "same"), rows=(16,))
    assert tuner.verdict(same).ratios
    with pytest.raises(Disagreement, match="16 rows"):
        tuner.verdict(replace(site_of(lambda x: (x > 0,), lambda x: (x <= 0,), "other"), rows=(16,)))


def test_a_level_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"tune.*'slow'"):
        fxopt.Config(tune="slow")


class NormOfSelected(nn.Module):
    """Statistics that take no gradients; a number of rows that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.eye(2).bool())

    def forward(self, x: Tensor) -> Tensor:
        selected = torch.masked_select(x.view(-1, 2, 2, 4), self.mask.unsqueeze(-1)).view(-1, 4)
        return self.last(self.norm(self.linear(selected)).relu()).sigmoid()


@pytest.mark.parametrize("gradients", [False, True])
def test_whatever_a_region_reads_it_can_be_timed(gradients: bool) -> None:
    model, x = NormOfSelected().eval(), torch.randn(6, 16)
    fast = fxopt.optimize(model)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(fast(x), model(x))
    (findings,) = dispatcher_of(fast).findings
    assert not [change for ran in findings.passes for change in ran.rolled_back]
