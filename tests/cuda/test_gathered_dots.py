"""Dots of vectors that are read from embedding tables: through the shim, and on a GPU."""

from __future__ import annotations

import ctypes
import operator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

import fxopt
from fxopt.kernels.columns import errors, reference
from fxopt.kernels.columns import op as columns_op
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Instr, Op, Plan, Source
from fxopt.kernels.gpu_dots import op as dots
from fxopt.kernels.gpu_dots.gathered import KERNEL, call_of, gathered_dots, in_two, load
from fxopt.kernels.gpu_dots.plan import vectors
from fxopt.rewrites.editor import Editor
from fxopt.rewrites.gpu_gathered_dots import REWRITE
from fxopt.tune.tuner import Verdict
from tests.cuda.on_a_gpu import names_of, rewritten
from tests.cuda.planted import awake
from tests.cuda.shim_library import Shim, ShimError, _arrays
from tests.cuda.test_gpu_dots import PAIRS, with_bugs

MUTATIONS = PAIRS | {
    "no bounds check": ("gathered.cu", "__any_sync(kAll, wanted &&", "__any_sync(kAll, !{} && wanted &&"),
    "vectors of another sample": ("gathered.cu", "int64_t(sample) * v", "int64_t(sample ^ {}) * v"),
    "vectors in another order": ("gathered.cu", "vector & 31)", "(vector & 31) ^ {})"),
    "not all chunks": ("gathered.cu", "if (!real) return;", "if (!real || ({} && chunk == 3)) return;"),
}  # fmt: skip


class Dots(Shim):
    """gathered.cu for the shim, with every bug planted and asleep."""

    def __init__(self, folder) -> None:
        self.library = with_bugs(KERNEL, folder, MUTATIONS)
        for name in ("failure", "dots"):
            getattr(self.library, f"fxopt_cuda_{name}").restype = ctypes.c_bool
        self.library.fxopt_cuda_clamped.restype = ctypes.c_longlong

    def dots(self, tensors, tables, plan, before, i, j, width, seed=0):
        rest, keep = (before, i, j), list[object]()
        arrays, call = _arrays(rest, keep), self.library.fxopt_cuda_dots
        run = lambda request, *more: call(request, arrays, ctypes.c_int64(width), *more)  # noqa: E731
        return self._call(tensors, tables, encode(plan), seed, run, more=rest)[0]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return Dots(tmp_path_factory.mktemp("gathered"))


def example(B, T, D, dtype=torch.bfloat16, device="cpu", ids=torch.int64, packed=True, copied=True, bad_ids="raise"):
    """DLRM's: a dense vector (`copied`) and T lookups in tables of 5, 6, 7... rows, in one row with the dense part."""
    tables = [torch.randn(5 + t, D, device=device).to(dtype) for t in range(T)]
    x = torch.randn(B, D, device=device).to(dtype)
    found = torch.stack([torch.randint(0, 5 + t, (B,), device=device) for t in range(T)], 1).to(ids)
    tensors = [x, found] if packed else [x, *found.unbind(1)]
    columns = [Column(Source(0, lane=1, length=D), None, 0, 0)] if copied else []
    for t in range(T):
        source = Source(1, fixed=((1, t),)) if packed else Source(1 + t)
        columns.append(Column(source, t, 0, (t + copied) * D, name=f"field {t}", table_name=f"table {t}"))
    plan = Plan(tuple(columns), (len(columns) * D,), (str(dtype).removeprefix("torch."),), bad_ids)
    i, j = torch.tril_indices(len(columns), len(columns), -1, device=device)
    return tensors, tables, plan, x, i.contiguous(), j.contiguous(), D + len(i)


def exact(tensors, tables, plan, before, i, j, width):
    (flat,) = reference.columns([t.cpu() for t in tensors], [t.cpu() for t in tables], plan)
    dim = tables[0].shape[1]
    z = flat.view(len(flat), flat.shape[1] // dim, dim).double()
    return dots.reference(z, before.cpu().double(), i.cpu(), j.cpu(), width)


def assert_close(found, expected):
    eps = max(1e-6, torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=eps, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "T", "D"), [(1, 26, 64), (7, 8, 16), (16, 3, 48), (2, 31, 128), (0, 4, 16), (9, 17, 32)])
def test_equals_fp64(shim, dtype, B, T, D):
    for more in ({}, {"ids": torch.int32}, {"packed": False}, {"copied": False}):
        arguments = example(B, T, D, dtype, **more)
        assert vectors(arguments[2], D) == T + more.get("copied", True)
        assert_close(shim.dots(*arguments, seed=B), exact(*arguments))
    *arguments, width = arguments
    assert_close(shim.dots(*arguments, width + 3), exact(*arguments, width + 3))


def test_rows_that_are_not_aligned(shim):
    *arguments, x, i, j, width = example(5, 4, 16)
    tensors, tables, _ = arguments
    tables[1] = torch.randn(9, 19).bfloat16()[:, 3:]
    tensors[0] = x = torch.randn(5, 18).bfloat16()[:, 1:17]
    assert_close(shim.dots(*arguments, x, i, j, width), exact(*arguments, x, i, j, width))


def test_programs_and_negative_ids(shim):
    tensors, tables, plan, *rest = example(6, 4, 16)
    columns = list(plan.columns)
    program = (Instr(Op.REMAINDER, "int64", a=5),)
    columns[2] = Column(Source(1, fixed=((1, 1),)), 1, 0, columns[2].offset, program=program)
    columns[3] = Column(Source(1, fixed=((1, 2),)), 2, 0, columns[3].offset, wrap_negative=True)
    tensors[1][:, 1] += 1000
    tensors[1][::2, 2] -= tables[2].shape[0]
    plan = Plan(tuple(columns), plan.widths, plan.dtypes)
    assert_close(shim.dots(tensors, tables, plan, *rest), exact(tensors, tables, plan, *rest))


def bad(bad_ids="raise", device="cpu"):
    """Ids outside their tables at (row 3, column 2) and (row 1, column 4)."""
    arguments = example(6, 5, 16, device=device, bad_ids=bad_ids)
    ids = arguments[0][1]
    ids[3, 1], ids[1, 3] = 6, -7
    return arguments


def test_bad_ids_are_reported(shim):
    arguments = bad()
    found = shim.dots(*arguments)
    assert shim.failure().startswith("fxopt-bad-id column=2 row=3 lane=0 value=6 rows=6 ")
    assert shim.failure() == ""
    expected = _good(arguments)
    i, j = arguments[4:6]
    for row, column in ((3, 2), (1, 4)):
        expected[row, 16:][(i == column) | (j == column)] = float("nan")
    assert_close(found, expected)


def _good(arguments):
    """What row 0 of the tables would have given."""
    ids = arguments[0][1].clone()
    ids[3, 1] = ids[1, 3] = 0
    return exact([arguments[0][0], ids], *arguments[1:])


def test_bad_ids_are_moved(shim):
    arguments = bad("clamp")
    before = shim.library.fxopt_cuda_clamped(0)
    found = shim.dots(*arguments)
    assert shim.library.fxopt_cuda_clamped(0) - before == 2 and shim.failure() == ""
    arguments[0][1][3, 1], arguments[0][1][1, 3] = 5, 0
    assert_close(found, exact(*arguments))


def test_clamped_ids_of_rows_that_pad_a_batch_do_not_count(shim):
    arguments = bad("clamp")
    real = torch.tensor([2])
    at = shim._name(real)
    before = shim.library.fxopt_cuda_clamped(0)
    shim.library.fxopt_cuda_real_rows(at, ctypes.c_int64(6))
    try:
        run = shim.dots
        arguments[1].append(real)  # so that it may be read
        run(*arguments)
    finally:
        shim.library.fxopt_cuda_real_rows(None, ctypes.c_int64(0))
    assert shim.library.fxopt_cuda_clamped(0) - before == 1


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
    arguments = example(6, 26, 32, dtype)
    if "bounds" in name:
        arguments[0][1][2, 25] = 10**6
    if "pairs" in name:
        arguments[4][0] = 31
    try:
        with awake(shim.library, MUTATIONS, name):
            found = shim.dots(*arguments, seed=3).double()
    except ShimError:
        return
    if "pairs" in name:
        assert not found[:, 32].isnan().any()
        return
    assert not torch.allclose(found, exact(*arguments), rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_refused(shim):
    tensors, tables, plan, *rest = example(4, 3, 16)
    with pytest.raises(RuntimeError, match="fxopt-unfit: column 2"):
        shim.dots(tensors, [tables[0], tables[1].float(), tables[2]], plan, *rest)
    with pytest.raises(RuntimeError, match="fxopt-unfit"):
        shim.dots(tensors, tables, plan, rest[0].float(), *rest[1:])


def test_plans_that_are_vectors():
    plan = example(2, 3, 16)[2]
    assert vectors(plan, 16) == 4 and vectors(plan, 32) is None
    for column in (
        Column(Source(1, lane=1), 0, 0, 16),
        Column(Source(1), 0, 0, 16, pool="sum"),
        Column(Source(1), 0, 0, 32),
        Column(Source(1), None, 0, 16),
    ):
        assert vectors(Plan((plan.columns[0], column, *plan.columns[2:]), plan.widths, plan.dtypes), 16) is None


def test_without_the_kernel_both_steps_serve():
    load()
    tensors, tables, plan, *rest = example(3, 4, 8, torch.float32)
    expected = exact(tensors, tables, plan, *rest)
    for call in (gathered_dots, in_two, torch.ops.fxopt.gathered_dots):
        assert_close(call(tensors, tables, encode(plan), *rest), expected)


def on_a_gpu(tensors, tables, plan, before, i, j, width, read_twice=False):
    """The graph of dots behind a call of columns, whose tensors say that they are on a GPU."""
    dots.load()
    columns_op.load()
    graph = Graph()
    inputs = [before, i, j, *tables, *tensors[1:]]
    nodes = [graph.placeholder(f"input_{number}") for number in range(len(inputs))]
    with FakeTensorMode():
        for node, tensor in zip(nodes, inputs, strict=True):
            node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    output = graph.output(())
    module = GraphModule(nn.Module(), graph)
    editor, rest, weights, ids = Editor(module, output), nodes[:3], nodes[3 : 3 + len(tables)], nodes[3 + len(tables) :]
    encoded = editor.constant("plan", encode(plan))
    call = editor.call(torch.ops.fxopt.columns.default, [rest[0], *ids], weights, encoded)
    flat = editor.call(operator.getitem, call, 0)
    z = editor.call(torch.ops.aten.view.default, flat, [len(before), -1, tables[0].shape[1]])
    found = editor.call(torch.ops.fxopt.gpu_dots.default, z, *rest, width)
    output.args = ((found, flat) if read_twice else (found,),)
    return module


def test_lookups_in_front_of_dots_are_found():
    module = on_a_gpu(*example(7, 3, 16))
    (found,) = rewritten(module, REWRITE)
    assert len(found.changes) == 1 and not found.rolled_back and not found.misses
    assert names_of(module) == ["fxopt.gathered_dots"]


def test_lookups_that_others_read_stay():
    module = on_a_gpu(*example(7, 3, 16), read_twice=True)
    (found,) = rewritten(module, REWRITE)
    assert not found.changes and "fxopt.gpu_dots" in names_of(module)


def test_other_vectors_stay_with_a_reason():
    pooled = {"pool": "sum", "source": Source(1, lane=1)}
    for dim, change, reason in ((16, pooled, "found pooling"), (24, {}, "found 4 of 24")):
        tensors, tables, plan, *rest = example(7, 3, dim)
        columns = [replace(column, **change) if column.table == 1 else column for column in plan.columns]
        module = on_a_gpu(tensors, tables, replace(plan, columns=tuple(columns)), *rest)
        (found,) = rewritten(module, REWRITE)
        assert not found.changes and reason in found.misses[0].reason


def test_with_gradients_nothing_changes():
    module = on_a_gpu(*example(7, 3, 16))
    (found,) = rewritten(module, REWRITE, inference=False)
    assert not found.changes and "fxopt.gpu_dots" in names_of(module)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "T", "D"), [(2048, 26, 64), (1, 8, 16), (33, 31, 128), (0, 4, 16), (9, 40, 48), (5, 3, 24)]
)
def test_on_a_gpu(dtype, B, T, D):
    for more in ({}, {"ids": torch.int32, "copied": False}, {"packed": False}):
        tensors, tables, plan, *rest = example(B, T, D, dtype, "cuda", **more)
        found = gathered_dots(tensors, tables, encode(plan), *rest)
        expected = exact(tensors, tables, plan, *rest)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=max(1e-3, torch.finfo(dtype).eps), atol=1e-3)


@pytest.mark.gpu
def test_bad_ids_on_a_gpu():
    tensors, tables, plan, *rest = arguments = bad(device="cuda")
    found = call_of(plan)(tensors, tables, encode(plan), *rest)
    with pytest.raises(errors.BadId, match=r"field 1: id 6 at row 3 is outside table 'table 1' with 6 rows"):
        errors.check()
    rows = found.isnan().any(1).tolist()
    assert [row for row in range(6) if rows[row]] == [1, 3]
    before = errors.clamped()
    arguments = bad("clamp", device="cuda")
    assert gathered_dots(*arguments[:2], encode(arguments[2]), *arguments[3:]).isfinite().all()
    assert errors.clamped() - before == 2


class Interaction(nn.Module):
    """DLRM without its layers."""

    def __init__(self, dtype=torch.bfloat16, T=8, D=64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50 + t, D, dtype=dtype, device="cuda") for t in range(T))
        i, j = torch.tril_indices(T + 1, T + 1, -1, device="cuda")
        self.register_buffer("i", i.contiguous())
        self.register_buffer("j", j.contiguous())

    def forward(self, x, ids):
        z = torch.stack([x, *(table(ids[:, t]) for t, table in enumerate(self.tables))], 1)
        return torch.cat([x, torch.bmm(z, z.transpose(1, 2))[:, self.i, self.j]], 1)


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_rewritten(dtype, monkeypatch):
    for name in ("faster", "slower", "mixed"):
        monkeypatch.setattr(Verdict, name, name == "faster")
    model = Interaction(dtype)
    inputs = torch.randn(300, 64, dtype=dtype, device="cuda"), torch.randint(0, 50, (300, 8), device="cuda")
    with torch.no_grad():
        optimized = fxopt.optimize(model, inputs, fxopt.Config(cuda_graphs=True))
        (found,) = optimized._fxopt.findings
        assert "gpu_gathered_dots" in {ran.name for ran in found.passes if ran.changes}
        for rows in (300, 1, 77):
            given = [each[:rows] for each in inputs]
            torch.testing.assert_close(optimized(*given), model(*given), rtol=2e-2, atol=2e-2)
        with pytest.raises(IndexError, match=r"id 999 at row 4 is outside table 'tables.3.weight' with 53 rows"):
            ids = inputs[1].clone()
            ids[4, 3] = 999
            optimized(inputs[0], ids)
            errors.check()
