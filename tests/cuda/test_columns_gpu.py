"""The columns operator on a GPU, against the reference on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.cuda import use
from fxopt.kernels.columns.cuda.tuning import VARIANTS, tune
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.errors import BadId, call_of, check, clamped
from fxopt.kernels.columns.op import columns
from fxopt.kernels.columns.plan import Column, Offsets, Op, Plan, Source
from tests.cuda import test_block_bags_shim as block_bags
from tests.cuda import test_codes_shim as codes
from tests.cuda import test_copies_shim as copies
from tests.cuda.compare import RELATIVE, assert_same, random_call
from tests.cuda.test_long_bags_shim import CASES
from tests.cuda.test_short_bags_shim import with_long_ones
from tests.cuda.test_staged_shim import bags
from tests.cuda.test_tiles_shim import TABLE_ROWS, narrow
from tests.kernels.conftest import RandomCall

pytestmark = pytest.mark.gpu


def on_gpu(seed: int, rows: int, n_columns: int = 12) -> RandomCall:
    call = random_call(seed, rows, n_columns)
    call.tensors = [t.cuda() for t in call.tensors]
    call.tables = [t.cuda() for t in call.tables]
    return call


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 21, 70, 600])
@pytest.mark.parametrize("seed", range(20))
def test_kernel_equals_reference(seed, rows):
    call = on_gpu(seed * 1000 + rows, rows)
    (found,) = columns(call.tensors, call.tables, encode(call.plan))
    check()
    assert found.is_cuda
    assert_same(call, found)


def lookup(ids, table, **more):
    plan = Plan(
        (Column(Source(0), 0, 0, 0, name="column 0 (emb)", table_name="emb.weight", **more),),
        (table.shape[1],),
        ("float32",),
    )
    return columns([ids], [table], encode(plan)), plan


@pytest.mark.parametrize("bad", [None, "clamp", "raise"])
def test_tiles_equal_the_reference(bad):
    tensors, tables, plan = narrow()
    if bad:
        tensors[1][[0, 41]], plan = torch.tensor([-5, 60], dtype=torch.int32), replace(plan, bad_ids=bad)
    on_device = [t.cuda() for t in tensors], [t.cuda() for t in tables]
    before = clamped()
    (found,) = columns(*on_device, encode(plan))
    if bad == "raise":
        with pytest.raises(BadId, match="id -5 at row 0"):
            check()
        return
    tensors[1].clamp_(0, TABLE_ROWS - 1)
    assert clamped() - before == (2 * 42 if bad else 0)  # in 41 columns and a bag
    assert torch.equal(found.cpu(), reference.columns(tensors, tables, plan)[0])


@pytest.mark.parametrize("dim", [8, 12, 128])
@pytest.mark.parametrize("bad", [None, "clamp", "raise"])
def test_short_bags_equal_the_reference(bad, dim):
    tensors, tables, plan = with_long_ones(dim, rows=20_000)
    if bad:
        tensors[0][1000], plan = -5, replace(plan, bad_ids=bad)
    on_device = [t.cuda() for t in tensors], [t.cuda() for t in tables]
    before = clamped()
    (found,) = columns(*on_device, encode(plan))
    if bad == "raise":
        with pytest.raises(BadId, match="id -5 at row"):
            check()
    else:
        assert clamped() - before == (bad is not None)
    tensors[0].clamp_(0)
    expected = reference.columns(tensors, tables, plan)[0]
    if bad == "raise":
        expected[torch.bucketize(1000, tensors[1], right=True) - 1] = float("nan")
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def test_a_bad_id_is_named_and_the_device_lives_on():
    table, ids = torch.randn(7, 8, device="cuda"), torch.randint(0, 7, (300,), device="cuda")
    ids[[41, 290]] = torch.tensor([7, -1], device="cuda")
    (out,), plan = lookup(ids, table)
    with pytest.raises(BadId, match=r"column 0 \(emb\): id 7 at row 41 is outside table 'emb.weight' with 7 rows"):
        check()
    assert out[41].isnan().all() and out[290].isnan().all() and not out[40].isnan().any()
    check()
    lookup(ids, table)
    torch.cuda.synchronize()
    with pytest.raises(BadId, match="id 7 at row 41"):
        call_of(plan)([ids.clamp(0, 6)], [table], encode(plan))
    (again,), _ = lookup(ids.clamp(0, 6), table)
    check()
    assert torch.equal(again, table[ids.clamp(0, 6)])


def test_clamp_counts():
    table, ids = torch.randn(7, 8, device="cuda"), torch.tensor([3, 9, -2, 6], device="cuda")
    before = clamped()
    plan = Plan((Column(Source(0), 0, 0, 0),), (8,), ("float32",), bad_ids="clamp")
    (out,) = columns([ids], [table], encode(plan))
    check()
    assert torch.equal(out, table[[3, 6, 0, 6]]) and clamped() - before == 2


def test_broken_offsets_are_reported():
    table, ids = torch.randn(7, 8, device="cuda"), torch.randint(0, 7, (30,), device="cuda")
    plan = Plan((Column(Source(0), 0, 0, 0, pool="sum", bag=Offsets(1)),), (8,), ("float32",))
    columns([ids, torch.tensor([0, 20, 10], device="cuda")], [table], encode(plan))
    with pytest.raises(RuntimeError, match=r"offsets of bag 1 are \[20, 10\)"):
        check()


def test_graph_replays_new_inputs_and_new_weights():
    call = on_gpu(5, 70)
    plan = encode(call.plan)
    columns(call.tensors, call.tables, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = columns(call.tensors, call.tables, plan)
    for t in call.tables:
        t.copy_(torch.randn_like(t))
    for t in call.tensors:
        if t.dtype == torch.float32:
            t.copy_(torch.rand_like(t) + 0.5)
    graph.replay()
    assert_same(call, out)


def test_streams_and_many_shapes():
    calls = [on_gpu(s, rows) for s, rows in enumerate((1, 21, 70, 300, 600))]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    outs = {}
    for _ in range(3):
        for k, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                outs[k] = columns(call.tensors, call.tables, encode(call.plan))[0]
    check()
    for k, call in enumerate(calls):
        assert_same(call, outs[k])


def test_tune_keeps_a_build_and_answers_and_errors_stay():
    call = on_gpu(3, 70)
    plan = encode(call.plan)
    try:
        times = tune(lambda: columns(call.tensors, call.tables, plan))
        assert set(times) == set(VARIANTS) and all(t > 0 for t in times.values())
        for flags in VARIANTS.values():
            use(flags)
            assert_same(call, columns(call.tensors, call.tables, plan)[0])
            lookup(torch.tensor([7], device="cuda"), torch.randn(7, 8, device="cuda"))
            with pytest.raises(BadId, match="id 7 at row 0"):
                check()
    finally:
        use()


def laid_out(tensor):
    """On the GPU, of the same strides, also where they are 0."""
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(tensors, tables, plan):
    return [laid_out(t) for t in tensors], [codes.moved(t) for t in tables], plan


@pytest.mark.parametrize("name", CASES)
def test_cut_bags_equal_the_reference(name):
    tensors, tables, plan = moved(*CASES[name]())
    found, again = (columns(tensors, tables, encode(plan))[0] for _ in range(2))
    check()
    (expected,) = reference.columns(tensors, tables, plan)
    assert torch.equal(found, again)
    assert plan.columns[0].pool != "max" or torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=RELATIVE[tables[0].dtype], atol=1e-4)


@pytest.mark.parametrize("name", block_bags.CASES)
def test_bags_of_a_block_equal_the_reference(name):
    """Cases that a GPU's size leaves to warps too."""
    torch.manual_seed(len(name))
    tensors, tables, plan = moved(*block_bags.CASES[name]())
    found, again = (columns(tensors, tables, encode(plan))[0] for _ in range(2))
    check()
    (expected,) = reference.columns(tensors, tables, plan)
    assert torch.equal(found.nan_to_num(), again.nan_to_num())
    relative = RELATIVE.get(tables[0].dtype, 2e-5)
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative, equal_nan=True)


@pytest.mark.parametrize("call", [block_bags.padded, block_bags.jagged])
@pytest.mark.parametrize("bad", ["clamp", "raise"])
def test_a_bad_id_of_a_block_spoils_its_bag_alone(bad, call):
    tensors, tables, plan = moved(*call())
    tensors[0].view(-1)[60] = 50
    (found,) = columns(tensors, tables, encode(replace(plan, bad_ids=bad)))
    if bad == "raise":
        with pytest.raises(BadId, match="id 50 at row 0"):
            check()
        assert found[:, -8:].isnan().all(1).tolist() == [True, False, False]
        return
    tensors[0].view(-1)[60] = 49
    assert torch.equal(found, columns(tensors, tables, encode(plan))[0])


CALLS = [
    *(lambda shape=shape: copies.expanded(*shape) for shape in ((9, 5, 64), (300, 7, 12), (3, 43, 1))),
    lambda: copies.expanded(dtype=torch.bfloat16),
    lambda: copies.expanded(dtype=torch.float64),
    *(lambda rows=rows: copies.wide(rows) for rows in (1, 45, 2048)),
    *(lambda op=op: copies.sliced_ids(op) for op in (None, Op.BUCKETIZE, Op.REMAINDER)),
]


@pytest.mark.parametrize("call", CALLS)
def test_copies_and_ids_of_any_strides_equal_the_reference(call):
    tensors, tables, plan = call()
    on_device = moved(tensors, tables, plan)
    found = columns(*on_device[:2], encode(plan))
    check()
    for a, b in zip(found, reference.columns(tensors, tables, plan), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("how", [{}, *({"pool": pool, "bag": Offsets(1)} for pool in ("sum", "mean", "max"))])
def test_rows_in_8_bits(how):
    call = (
        [torch.randint(0, 50, (400,)), torch.tensor([0, 0, 1, 40, 390])],
        codes.tables(50),
        codes.plan("float32", **how),
    )
    tensors, tables, plan = moved(*call)
    (found,), (expected,) = columns(tensors, tables, encode(plan)), reference.columns(tensors, tables, plan)
    check()
    assert how.get("pool") in ("sum", "mean") or torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 4), (torch.bfloat16, 16), (torch.float16, 32)])
def test_staged_rows_give_the_same_bits(dtype, dim):
    tensors, tables, plan = moved(*bags(dtype, dim, (7, 0, 1, 33, 4) * 400 + (700,)))
    (right,) = columns(tensors, tables, encode(plan))
    try:
        use(VARIANTS["narrow rows staged"])
        assert all(torch.equal(columns(tensors, tables, encode(plan))[0], right) for _ in range(20))
        check()
    finally:
        use()


@pytest.mark.parametrize("seed", range(6))
def test_gradients_equal_the_references(seed):
    call = on_gpu(seed, 21)
    tables = [t.detach().clone().requires_grad_() for t in call.tables]
    plan = replace(call.plan)
    (found,) = columns(call.tensors, tables, encode(plan))
    grad = torch.rand_like(found)
    got = torch.autograd.grad(found, tables, grad)
    again = torch.autograd.grad(columns(call.tensors, tables, encode(plan))[0], tables, grad)
    (expected,) = reference.columns(call.tensors, tables, plan)
    want = torch.autograd.grad(expected, tables, grad)
    for a, b, c in zip(got, want, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert torch.equal(a.nan_to_num(), c.nan_to_num())
