"""The dense side on CUDA: what its passes find on tensors that say they are on a GPU, and what it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.kernels.attention import plan as p
from fxopt.kernels.attention import reference
from fxopt.kernels.attention.cuda import call_on_cuda
from fxopt.kernels.attention.plan import Axis, Operand, Plan
from fxopt.kernels.pointwise.encode import plan_of
from fxopt.rewrites import attention, grouped_pointwise, pointwise, repeated
from fxopt.rewrites.attention_program import program_of
from fxopt.rewrites.framework.editor import Rejected
from fxopt.rewrites.framework.policy import PROVEN
from tests.cuda.generated import Kernels, key_of
from tests.cuda.on_a_gpu import names_of, rewritten
from tests.cuda.pretended import constants_on_cuda, traced

PAIRS = [(i, j) for i in range(5) for j in range(i)]
PASSES = (attention.REWRITE, repeated.REWRITE, repeated.LOOKUPS_ON_CUDA, pointwise.CROSSES, pointwise.REWRITE)


def bilinear(x, *weights):
    rows = [F.linear(x[:, i], weight) * x[:, j] for weight, (i, j) in zip(weights, PAIRS, strict=True)]
    return torch.stack(rows, 1)


def field_aware(ids, *tables):
    rows = [F.embedding(ids, table) for table in tables]
    return torch.stack([rows[j][:, i] * rows[i][:, j] for i, j in PAIRS], 1).sum(2)


def crossed(x, *weights):
    y = x = torch.cat([x, x], 1)  # its strides are known
    for weight in weights:
        y = x * F.linear(y, weight) + y
    return y


def mixed(gates, experts):
    return torch.bmm(torch.softmax(gates, 2), experts) * 2


def heads(x, q, k, v):
    def split(weight):
        return torch.stack(torch.split(F.linear(x, weight), 4, 2))

    scores = torch.softmax(torch.einsum("hbik,hbjk->hbij", split(q), split(k)), -1)
    return torch.cat(torch.split(scores @ split(v), 1), -1).squeeze(0), scores


def beside_a_number(x):
    x = torch.cat([x, x], 1)
    return torch.relu(x * x.new_zeros(())) + torch.tanh(x)


def summed(x):
    return torch.cat([x, x], 2).sum(2)


def normalized(x):
    return F.layer_norm(x, (4,))


@pytest.mark.parametrize(
    ("function", "shapes", "found", "count"),
    [
        (bilinear, [(7, 5, 4), *[(4, 4)] * 10], "repeated", "fxopt.pointwise"),
        (crossed, [(7, 3), *[(1, 6)] * 3], "crosses", "fxopt.pointwise"),
        (mixed, [(7, 2, 3), (7, 3, 4)], "pointwise", "fxopt.pointwise"),
        (heads, [(7, 5, 8), *[(8, 8)] * 3], "attention", "fxopt.attention"),
        (beside_a_number, [(7, 6)], "pointwise", "fxopt.pointwise"),
        (summed, [(7, 5, 4)], "pointwise", "fxopt.pointwise"),
        (normalized, [(7, 5, 4)], "pointwise", "fxopt.pointwise"),
    ],
)
def test_what_is_found_gives_eagers_numbers(function, shapes, found, count):
    inputs = [torch.randn(shape) for shape in shapes]
    module = traced(function, inputs)
    for weight in module.graph.find_nodes(op="placeholder")[1:] if function is bilinear else ():
        weight.meta["state"] = weight.name
    with constants_on_cuda():
        ran = {each.name: each for each in rewritten(module, *PASSES)}
    assert ran[found].changes and not any(each.rolled_back for each in ran.values())
    assert names_of(module).count(count) == 1
    torch.testing.assert_close(module(*inputs), function(*inputs))
    assert not any(each.changes for each in rewritten(traced(function, inputs), *PASSES, inference=False))


@pytest.mark.parametrize("function", [lambda x: x.softmax(2), torch.sigmoid, lambda x: x.sum((0, 2)), torch.sum])
def test_other_operators_alone_stay(function):
    module = traced(lambda x: function(torch.cat([x, x], 2)), [torch.randn(7, 5, 4)])
    (ran,) = rewritten(module, pointwise.REWRITE)
    assert not ran.changes and not ran.rolled_back


def masked_and_normalized(x, masks):
    """A norm over channels beside a mask of pairs of positions, which share `real`."""
    x, real = torch.cat([x, x]), torch.cat([masks, masks]).gt(0).float()
    return F.layer_norm(x * real[:, :, None], (4,)), torch.exp(real[:, :, None] * real[:, None, :])


def test_results_along_other_axes_than_a_sum_are_apart():
    """So that lanes share the rows of the norm."""
    inputs = [torch.randn(7, 5, 4), torch.randn(7, 5)]
    module = traced(masked_and_normalized, inputs)
    with constants_on_cuda():
        (ran,) = rewritten(module, pointwise.REWRITE)
    assert ran.changes and not ran.rolled_back
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.pointwise.default)
    assert len(calls) == 2
    (norm,) = (plan for plan in (plan_of(call.args[1]) for call in calls) if any(s.op == "mean" for s in plan.steps))
    assert norm.axes == 3
    torch.testing.assert_close(module(*inputs), list(masked_and_normalized(*inputs)))


def experts(x, *stats):
    """Layers' ends side by side: four with a ReLU, of two widths, and one without."""
    parts = torch.cat([x, x, x], 1).split([4, 3, 4, 3, 4], 1)
    normed = [F.batch_norm(part, *stats[at : at + 2]) for part, at in zip(parts, range(0, 10, 2), strict=True)]
    return torch.cat([*map(torch.relu, normed[:4]), normed[4]], 1)


def test_calls_of_one_plan_are_one_launch():
    inputs = [torch.randn(7, 6), *(torch.rand(size) for size in (4, 3, 4, 3, 4) for _ in range(2))]
    module = traced(experts, inputs)
    with constants_on_cuda():
        ran = rewritten(module, pointwise.REWRITE, grouped_pointwise.REWRITE)
    assert [len(each.changes) for each in ran] == [5, 1] and not any(each.rolled_back for each in ran)
    assert [name for name in names_of(module) if "pointwise" in name] == [
        "fxopt.pointwise",
        "fxopt.gpu_grouped_pointwise",
    ]
    torch.testing.assert_close(module(*inputs), experts(*inputs))


def calls_behind_each_other(x):
    first = torch.relu(torch.cat([x, x], 1) * 2)
    return torch.relu(torch.cat([first, x], 1) * 2)


def test_calls_that_wait_for_each_other_stay_apart():
    module = traced(calls_behind_each_other, [torch.randn(7, 6)])
    ran = rewritten(module, pointwise.REWRITE, grouped_pointwise.REWRITE)
    assert [len(each.changes) for each in ran] == [2, 0]


def test_a_sum_alone_stays_on_the_cpu():
    with FakeTensorMode():
        module = make_fx(summed, pre_dispatch=True)(torch.empty(7, 5, 4))
    (ran,) = rewritten(module, pointwise.REWRITE)
    assert not ran.changes


def test_lookups_of_pieces_are_not_timed_one_by_one():
    inputs = [torch.randint(0, 9, (7, 5)), *(torch.randn(9, 4) for _ in range(5))]
    module = traced(field_aware, inputs)
    with constants_on_cuda():
        ran = {each.name: each for each in rewritten(module, *PASSES)}
    assert ran["gpu_repeated_lookups"].changes and not ran["repeated"].changes
    torch.testing.assert_close(module(*inputs), field_aware(*inputs))


def test_all_but_lookups_need_proof():
    assert {each.name for each in PASSES if each.on_cuda is not PROVEN} == {"gpu_repeated_lookups"}


def of_heads(masking: int = p.NO_MASK, weights: bool = False, safe: bool = False) -> Plan:
    """[B, L, 2 * D] and [B, S, 2 * D] with two heads of 4, the result as [B, L, 2, 4], a mask [B, 1, S]."""
    side = Operand((Axis(0, 1, -1), Axis(2, 4, 2), Axis(1, 1, -1), Axis(2, 1, 4)))
    mask = Operand((Axis(0, 1, -1), Axis(-1, 0, 1), Axis(-1, 0, 1), Axis(1, 1, -1)))
    order = (0, 2, 1, 3)
    return Plan(side, side, side, mask if masking else None, masking, -torch.inf, 0.5, order, weights, safe)


@pytest.mark.parametrize(
    ("masking", "safe"),
    [(p.NO_MASK, False), (p.FILL_SET, False), (p.FILL_SET, True), (p.FILL_UNSET, False), (p.ADDED, True)],
)
def test_attention_as_one_kernel(tmp_path, masking, safe):
    plan, (B, L, S) = of_heads(masking, weights=True, safe=safe), (3, 5, 7)
    q, k, v = torch.randn(B, L, 8), torch.randn(B, S, 8), torch.randn(B, S, 8)
    masked = torch.rand(B, S) < 0.5
    masked[0] = masking == p.FILL_SET  # a row without keys
    mask = torch.randn(B, S) if masking == p.ADDED else masked
    operands = [(q, plan.query), (k, plan.key), (v, plan.value), *([(mask, plan.mask)] if plan.mask else [])]
    views = [reference.view(tensor, operand) for tensor, operand in operands if operand is not None]
    program = plan_of(program_of(plan))
    result, weights = Kernels(tmp_path, [key_of(program, views)])(views, program)
    doubles = [view if view.dtype == torch.bool else view.double() for view in views]
    expected, exact = reference.attention(*doubles[:3], doubles[3] if plan.mask else None, None, plan)
    torch.testing.assert_close(result.double(), expected.permute(plan.order), rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(weights.transpose(1, 2).double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
    given = call_on_cuda(plan, program_of(plan))(q, k, v, [mask] if plan.mask else [], plan.words())
    torch.testing.assert_close(given[0], result, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert given[1].is_contiguous() and given[1].shape == exact.shape


def test_attention_that_no_program_computes():
    with pytest.raises(Rejected, match="made of positions"):
        program_of(of_heads(p.CAUSAL))
    with pytest.raises(Rejected, match="no float32 of at most 64 channels"):
        program_of(replace(of_heads(p.NO_MASK), weighing=p.SILU))
    side = Operand(tuple(Axis(dim, 1, -1) for dim in range(5)))
    with pytest.raises(Rejected, match="it has 3 batch dims, expected at most 2"):
        program_of(Plan(side, side, side, None, p.NO_MASK, 0.0, 1.0, (0, 1, 2, 3, 4), False))
