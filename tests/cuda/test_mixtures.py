"""Mixtures of experts on CUDA: which are found, and which stay. The kernel: test_mixtures_shim.py."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.mixtures.cuda.mixtures import gpu_mixtures
from fxopt.kernels.mixtures.serves import MOST_EXPERTS, MOST_MIXTURES
from fxopt.rewrites import mixtures
from tests.cuda.on_a_gpu import names_of, rewritten
from tests.cuda.pretended import traced

B, K, D = 7, 3, 5


def inputs(experts=K, gates=2, dtype=torch.float32):
    return [torch.randn(B, D, dtype=dtype) for _ in range(experts)], [
        torch.randn(B, K, dtype=dtype) for _ in range(gates)
    ]


def by_matmul(gates, experts):
    stack = torch.stack(experts, 1)
    return [torch.matmul(gate.softmax(1).unsqueeze(1), stack).squeeze(1) for gate in gates]


def by_bmm(gates, experts):
    stack = torch.cat([expert.unsqueeze(1) for expert in experts], 1)
    return [torch.bmm(gate.unsqueeze(1).softmax(-1), stack) for gate in gates]


def from_the_right(gates, experts):
    stack = torch.stack(experts, -1)
    return [torch.bmm(stack, gate.softmax(-1).view(-1, K, 1))[..., 0] for gate in gates]


def by_sums(gates, experts):
    stack = torch.cat(experts, -1).view(-1, K, D)
    left = (gates[0].softmax(-1).unsqueeze(-1) * stack).sum(1)
    return left, (stack * gates[1].softmax(-1).unsqueeze(-1)).sum(-2, keepdim=True)


def by_einsum(gates, experts):
    stack = torch.stack(experts)
    return [torch.einsum("bk,kbd->bd", gate.softmax(1), stack) for gate in gates]


def of_relus(gates, experts):
    """Made one behind the other: the second's inputs move in front of the first."""
    first = torch.bmm(gates[0].softmax(1)[:, None], torch.stack(experts, 1))[:, 0].relu()
    gate, expert = gates[1].exp(), experts[0].exp()
    second = torch.bmm(gate.softmax(1)[:, None], torch.stack([*experts[1:], expert], 1))
    return first, second[:, 0]


def found(function, *given, inference=True):
    gates, experts = given[1], given[0]
    module = traced(lambda *flat: function(list(flat[: len(gates)]), list(flat[len(gates) :])), [*gates, *experts])
    (ran,) = rewritten(module, mixtures.REWRITE, inference=inference)
    assert not ran.rolled_back
    return module, ran


@pytest.mark.parametrize("function", [by_matmul, by_bmm, from_the_right, by_sums, by_einsum, of_relus])
def test_what_is_found_gives_eagers_numbers(function):
    experts, gates = inputs()
    module, ran = found(function, experts, gates)
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_mixtures.default)
    assert len(ran.changes) == 1 and call.meta["bound"] is gpu_mixtures
    left = {"aten.stack", "aten.cat", "aten.softmax.int", "aten.bmm", "aten.matmul", "aten.mul.Tensor", "aten.einsum"}
    assert not left & {*names_of(module)}
    torch.testing.assert_close(module(*gates, *experts), list(function(gates, experts)))


def test_mixtures_of_different_experts_are_one_call_and_the_next_level_is_another():
    def levels(gates, experts):
        for _ in range(2):
            left = torch.bmm(gates[0][:, :2].softmax(1)[:, None], torch.stack(experts[:2], 1)).squeeze(1)
            experts = [left, torch.bmm(gates[1].softmax(1)[:, None], torch.stack(experts, 1)).squeeze(1), experts[2]]
        return experts[:2]

    experts, gates = inputs()
    module, ran = found(levels, experts, gates)
    assert [change.what for change in ran.changes] == ["2 mixtures of 3 experts in one launch"] * 2
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_mixtures.default)
    assert [call.args[2] for call in calls] == [[0, 1, 0, 1, 2]] * 2
    torch.testing.assert_close(module(*gates, *experts), levels(gates, experts))


def test_what_others_read_stays_for_them():
    def read(gates, experts):
        stack, weights = torch.stack(experts, 1), gates[0].softmax(1)
        return torch.bmm(weights[:, None], stack), stack.relu(), weights.exp()

    experts, gates = inputs()
    module, ran = found(read, experts, gates)
    assert len(ran.changes) == 1 and {"aten.stack", "aten.softmax.int"} <= {*names_of(module)}
    torch.testing.assert_close(module(*gates, *experts), list(read(gates, experts)))


def test_no_launch_has_more_than_it_takes():
    experts, gates = inputs(gates=MOST_MIXTURES + 2)
    _, ran = found(by_matmul, experts, gates)
    assert [change.what.split()[0] for change in ran.changes] == [str(MOST_MIXTURES), "2"]

    def of_its_own(gates, experts):
        return [by_matmul([gate], experts[3 * k : 3 * k + 3])[0] for k, gate in enumerate(gates)]

    experts, gates = inputs(experts=36, gates=12)
    module, ran = found(of_its_own, experts, gates)
    assert [change.what.split()[0] for change in ran.changes] == [str(MOST_EXPERTS // 3), "2"]
    torch.testing.assert_close(module(*gates, *experts), of_its_own(gates, experts))


def test_what_stays():
    def of_one(gates, experts):
        return by_matmul([gates[0][:, :1]], experts[:1])

    def over_rows(gates, experts):
        return torch.bmm(gates[0].softmax(0)[:, None], torch.stack(experts, 1))

    def without_softmax(gates, experts):
        return torch.bmm(gates[0].sigmoid()[:, None], torch.stack(experts, 1))

    def no_stack(gates, experts):
        return torch.bmm(gates[0].softmax(1)[:, None], torch.stack(experts, 1).relu())

    def of_wide_pieces(gates, experts):
        stack = torch.cat([experts[0][:, None], experts[1][:, None].repeat(1, 2, 1)], 1)
        return torch.bmm(gates[0].softmax(1)[:, None], stack)

    def other_channels(gates, experts):
        return torch.bmm(gates[0].softmax(1)[:, None], torch.cat(experts, 1).view(-1, D, K).transpose(1, 2))

    def edited_stack(gates, experts):
        stack = torch.stack(experts, 1)
        stack.mul_(2)
        return torch.bmm(gates[0].softmax(1)[:, None], stack)

    def in_double(gates, experts):
        return torch.bmm(gates[0].softmax(1, dtype=torch.float64)[:, None].float(), torch.stack(experts, 1))

    experts, gates = inputs()
    others = of_one, over_rows, without_softmax, no_stack, of_wide_pieces, other_channels, edited_stack, in_double
    for function in others:
        _, ran = found(function, experts, gates)
        assert not ran.changes, function
    for dtype in (torch.float64, torch.bfloat16):
        _, ran = found(by_matmul, *inputs(dtype=dtype))
        assert not ran.changes
    _, ran = found(by_matmul, experts, gates, inference=False)
    assert not ran.changes


@pytest.mark.parametrize("which", ["gate", "expert"])
def test_edits_are_reasons(which):
    def edited(gates, experts):
        gate, expert = gates[0] + 1, experts[0] + 1
        result = torch.bmm(gate.softmax(1)[:, None], torch.stack([expert, *experts[1:]], 1))
        (gate if which == "gate" else expert).zero_()
        return result, gate, expert

    _, ran = found(edited, *inputs())
    assert not ran.changes and any("is edited in place" in miss.reason for miss in ran.misses)
