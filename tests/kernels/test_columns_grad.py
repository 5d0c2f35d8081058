"""Gradients, fake tensors and what torch.library.opcheck asks of an operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt.kernels.columns import op, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, PerRow, Plan, Source


def small_call(dtype=torch.float64):
    """A column of each kind, two of them on one table, over 5 rows."""
    torch.manual_seed(0)
    tensors = [
        torch.rand(5, 3, dtype=dtype) * 10,  # 0: values, and a bucketized feature
        torch.tensor([2.0, 4.0, 8.0], dtype=dtype),  # 1: boundaries
        torch.randint(0, 6, (5, 4)),  # 2: padded sequences
        torch.randint(0, 6, (11,)),  # 3: jagged ids
        torch.tensor([0, 2, 2, 7, 9]),  # 4: their offsets
        torch.rand(11, dtype=dtype),  # 5: their weights
        torch.rand(5, 4, dtype=dtype),  # 6: a mask
        torch.rand(5, dtype=dtype) + 1,  # 7: divisors
    ]
    tables = [torch.randn(4, 2, dtype=dtype), torch.randn(6, 3, dtype=dtype)]
    jagged, padded = Source(3), Source(2, lane=1)
    columns = (
        Column(Source(0, fixed=((1, 1),)), 0, 0, 0, program=(Instr(Op.BUCKETIZE, "int64", tensor=1),)),
        Column(jagged, 1, 0, 2, pool="sum", bag=Offsets(4), weights=Source(5)),
        Column(jagged, 1, 0, 5, pool="mean", bag=Offsets(4), padding=3),
        Column(padded, 1, 0, 8, pool="sum", weights=Source(6, lane=1), divisor=PerRow(Source(7))),
        Column(padded, 1, 0, 11, pool="max"),
        Column(Source(0, lane=1), None, 0, 14),
        Column(Source(2, fixed=((1, 0),)), 1, 0, 17),
        Column(Source(2, fixed=((1, 2),)), 1, 0, 17, add=True),
        Column(padded, 1, 1, 0, frozen=2),
    )
    name = str(dtype).removeprefix("torch.")
    return tensors, tables, Plan(columns, (20, None), (name, name))


def differentiable(tensors, tables, tensor_indices=(0, 5, 6, 7)):
    for index in tensor_indices:
        tensors[index].requires_grad_()
    for table in tables:
        table.requires_grad_()
    return [tensors[i] for i in tensor_indices] + tables


def grads_of(function, tensors, tables, plan, wanted):
    outputs = function(tensors, tables, plan)
    torch.manual_seed(1)
    directions = [torch.randn(o.shape).to(torch.bfloat16).to(o.dtype) for o in outputs]  # the same in every dtype
    return torch.autograd.grad(outputs, wanted, directions)


def test_gradcheck():
    op.load()
    tensors, tables, plan = small_call()
    columns = tuple(replace(c, frozen=None) for c in plan.columns)
    encoded = encode(replace(plan, columns=columns))  # a frozen row has a gradient that autograd is not told
    wanted = differentiable(tensors, tables)

    def function(values, weights, mask, divisors, *tables):
        inputs = list(tensors)
        inputs[0], inputs[5], inputs[6], inputs[7] = values, weights, mask, divisors
        return tuple(op.columns(inputs, list(tables), encoded))

    assert torch.autograd.gradcheck(function, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tensor_indices", [(), (0, 5, 6, 7)], ids=["tables", "everything"])
def test_gradients_equal_the_references(dtype, tensor_indices):
    op.load()
    tensors, tables, plan = small_call(dtype)
    wanted = differentiable(tensors, tables, tensor_indices)
    expected = grads_of(reference.columns, tensors, tables, plan, wanted)
    found = grads_of(op.columns, tensors, tables, encode(plan), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seed", range(8))
def test_random_table_gradients(isa, random_call, seed):
    call = random_call(seed, 30, 8, ("lookup", "dense_pool", "bag", "more", "masked"))
    wanted = [table.requires_grad_() for table in call.tables]
    expected = grads_of(reference.columns, call.tensors, call.tables, call.plan, wanted)
    found = grads_of(op.columns, call.tensors, call.tables, encode(call.plan), wanted)
    wide = Plan(call.plan.columns, call.plan.widths, ("float64",))
    tables = [table.detach().double().requires_grad_() for table in call.tables]
    exact = grads_of(reference.columns, call.tensors, tables, wide, tables)
    for ours, eager, c in zip(found, expected, exact, strict=True):
        assert ours.dtype == eager.dtype
        most = 6 if len(ours) == 1 else 4  # one row sums what all positions give, in another order: 5 was seen
        bound = most * (eager - c).abs().max() + 32 * torch.finfo(ours.dtype).eps * (c.abs().max() + 1)
        assert (ours - c).abs().max() <= bound


def test_only_what_needs_grad():
    op.load()
    tensors, tables, plan = small_call()
    tables[1].requires_grad_()
    outputs = op.columns(tensors, tables, encode(plan))
    outputs[1].sum().backward()
    assert tables[0].grad is None and tensors[0].grad is None
    assert tables[1].grad[2].eq(0).all() and tables[1].grad.ne(0).any()  # 2 is the padding id of output 1
    assert tables[1].grad.shape == tables[1].shape


@pytest.mark.parametrize("name", ["columns", "columns_in_pytorch"])
def test_opcheck(name):
    op.load()
    tensors, tables, plan = small_call(torch.float32)
    differentiable(tensors, tables)
    torch.library.opcheck(getattr(torch.ops.fxopt, name).default, (tensors, tables, encode(plan)))


def test_a_gpu_without_a_kernel_has_the_same_gradients():
    op.load()
    tensors, tables, plan = small_call()
    wanted = differentiable(tensors, tables)
    expected = grads_of(op.columns, tensors, tables, encode(plan), wanted)
    found = grads_of(torch.ops.fxopt.columns_in_pytorch, tensors, tables, encode(plan), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_fake_sizes_stay_symbolic():
    op.load()
    tensors, tables, plan = small_call(torch.float32)
    encoded, env = encode(plan), ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        fakes = [mode.from_tensor(t, static_shapes=False) for t in tensors]
        weights = [mode.from_tensor(t, static_shapes=True) for t in tables]
        first, second = torch.ops.fxopt.columns(fakes, weights, mode.from_tensor(encoded, static_shapes=True))
    assert first.shape[0] == fakes[0].shape[0] and not isinstance(first.shape[0], int) and first.shape[1] == 20
    assert str(second.shape[1]) == f"3*{fakes[2].shape[1]}"
    assert not env.guards


def test_second_derivative():
    op.load()
    tensors, tables, plan = small_call()
    table = tables[0].requires_grad_()

    def second(outputs) -> torch.Tensor:
        (grad,) = torch.autograd.grad(outputs[0].pow(3).sum(), table, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), table)[0]

    expected = second(reference.columns(tensors, tables, plan))
    torch.testing.assert_close(second(op.columns(tensors, tables, encode(plan))), expected, rtol=1e-4, atol=1e-4)
