"""Branches beside each other: which are found, and that whatever reads or reuses memory waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.kernels import side_stream
from fxopt.normalize import remove_dead_code
from fxopt.patterns.branches import SIDE
from fxopt.rewrites import branches
from fxopt.rewrites.framework.direct import direct
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.programs import Program, two_towers
from tests.cuda.streams import Capture, Hazard, Stream, run_captured

SHAPES = [(4, 4)] * 4


def found(function: Callable, shapes=SHAPES) -> tuple[list[str], torch.fx.GraphModule]:
    module = graph_of(function, shapes)
    remove_dead_code(module)
    (findings,) = rewritten(module, branches.REWRITE)
    assert not findings.rolled_back
    return [change.what for change in findings.changes], module


def names_beside(module: torch.fx.GraphModule) -> list[str]:
    """The operators of its branches."""
    return [str(node.target).split(".")[1] for node in module.graph.nodes if SIDE in node.meta]


def test_two_towers_are_beside_each_other():
    changes, module = found(two_towers)
    assert len(changes) == 1 and "6 operators" in changes[0]
    assert sorted(set(names_beside(module))) in (["matmul", "relu"], ["matmul", "tanh"])
    inputs = [torch.randn(4, 4) for _ in range(4)]
    torch.testing.assert_close(module(*inputs), two_towers(*inputs))


def test_one_after_the_other_views_and_inputs_are_no_branches():
    def chain(x, a, b, c):
        return torch.relu(torch.relu(x @ a) @ b.t()) + c.view(4, 4)

    def shared(x, a, b, c):
        y = torch.relu(x @ a)
        return y + y.t()

    for function in (chain, shared):
        assert not found(function)[0]


def test_what_parameters_alone_make_runs_beside_the_end_of_what_is_in_front():
    def padded(x, a, b, c):
        for _ in range(5):
            x = torch.relu(x @ a)
        return F.pad(x @ b, (0, 4)) @ F.pad(c, (0, 4)).t()

    changes, module = found(padded)
    assert len(changes) == 1 and changes[0].startswith("1 operator (") and "beside 2 operators" in changes[0]
    assert names_beside(module) == ["pad", "t"]


def test_experts_outputs_and_several_regions():
    def experts(x, *weights):
        return [torch.relu(x @ weight) for weight in weights]

    def gated(x, a, b, c):
        mixed = torch.stack([torch.relu(x @ a), torch.relu(x @ b)]).sum(0)
        return torch.tanh(mixed @ c) * torch.sigmoid(mixed @ a)

    changes, module = found(experts)
    assert len(changes) == 1 and names_beside(module) == ["matmul", "relu"]
    changes, module = found(gated)
    assert len(changes) == 2 and len({node.meta[SIDE] for node in module.graph.nodes if SIDE in node.meta}) == 2


def test_effects_gradients_and_hosts_keep_their_place():
    def writes(x, a, b, c):
        a.add_(1)
        return two_towers(x, b, c)

    assert not found(writes)[0]
    module = graph_of(two_towers, SHAPES)
    assert not rewritten(module, branches.REWRITE, inference=False)[0].changes
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty(4, 4, device="meta")
    assert not rewritten(module, branches.REWRITE)[0].changes


def lowered(function: Callable, shapes=SHAPES) -> torch.fx.GraphModule:
    changes, module = found(function, shapes)
    assert changes
    direct(module, inference=True)
    return module


def test_forks_only_while_capturing(monkeypatch):
    inputs = [torch.randn(4, 4) for _ in range(4)]
    module = lowered(two_towers)
    assert "side_stream_fork" in module.code and "except BaseException" in module.code
    with monkeypatch.context() as quiet:
        quiet.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        quiet.delattr(torch.cuda, "set_stream")
        torch.testing.assert_close(module(*inputs), two_towers(*inputs))
    capture, result = run_captured(module, inputs, monkeypatch)
    torch.testing.assert_close(result, two_towers(*inputs))
    (side,) = capture.sides
    assert side.launched == 6 and capture.current is capture.main
    assert side.known <= capture.main.known, "a branch that nobody waits for"


def test_graphs_of_two_streams_share_none(monkeypatch):
    """Their replays may run at once, and cuBLAS has one workspace a stream."""
    inputs = [torch.randn(4, 4) for _ in range(4)]
    module = lowered(two_towers)
    capture, _ = run_captured(module, inputs, monkeypatch)
    capture.main = capture.current = Stream()
    with capture:
        module(*inputs)
        module(*inputs)
    assert [side.launched for side in capture.sides] == [6, 12]


def test_an_error_beside_or_within_a_branch_leaves_no_fork_open(monkeypatch):
    def sized(x, y, a, b):
        return torch.tanh(torch.relu(x @ a)) + torch.sigmoid(torch.sin(y @ b))

    module = lowered(sized)
    good, bad = torch.randn(4, 4), torch.randn(5, 5)
    for broken in range(2):
        inputs = [good, good, good, good]
        inputs[2 + broken] = bad
        capture = Capture(monkeypatch)
        with capture, pytest.raises(RuntimeError):
            module(*inputs)
        assert capture.current is capture.main
        assert all(side.known <= capture.main.known for side in capture.sides)


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_random_programs(first, monkeypatch):
    applied = 0
    for seed in range(first, first + 30):
        program = Program(seed)
        inputs = [torch.randn(4, 4) for _ in range(4)]
        changes, module = found(program)
        applied += len(changes)
        direct(module, inference=True)
        capture, results = run_captured(module, inputs, monkeypatch)
        for result, expected in zip(results, program(*inputs), strict=True):
            torch.testing.assert_close(result, expected)
        assert capture.current is capture.main
        assert all(side.known <= capture.main.known for side in capture.sides)
    assert applied > 20


def _no_wait(graph) -> None:
    """A bug in the calls of `side_stream`; so is the next."""
    for node in graph.find_nodes(op="call_function", target=side_stream.join):
        graph.erase_node(node)


def _nothing_held(graph) -> None:
    for node in graph.find_nodes(op="call_function", target=side_stream.join):
        node.args = node.args[:1]


@pytest.mark.parametrize("broken", [_no_wait, _nothing_held])
def test_planted_bugs_are_caught(broken, monkeypatch):
    caught = 0
    for seed in range(60):
        _, module = found(Program(seed))
        direct(module, inference=True)
        broken(module.graph)
        module.recompile()
        try:
            run_captured(module, [torch.randn(4, 4) for _ in range(4)], monkeypatch)
        except Hazard:
            caught += 1
    assert caught > 5


def test_branches_that_do_not_wait_for_the_main_stream_are_caught(monkeypatch):
    monkeypatch.setattr("tests.cuda.streams.Stream.wait_stream", lambda self, other: None)
    module = lowered(lambda x, *weights: two_towers(torch.relu(x), *weights))
    with pytest.raises(Hazard):
        run_captured(module, [torch.randn(4, 4) for _ in range(4)], monkeypatch)


def test_names_stay():
    module = found(two_towers)[1]
    assert sorted(names_of(module)) == sorted(names_of(graph_of(two_towers, SHAPES)))
