"""Products of two and three tensors in many spellings: what they become, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.kernels.by_rows import op
from fxopt.kernels.by_rows.many import looking
from fxopt.rewrites import PASSES
from fxopt.runtime import dispatcher_of

OURS = ("disguised_linears", "contractions", "compressed_interaction")
OTHERS = tuple(ran.name for ran in PASSES if ran.name not in (*OURS, "views"))


class Model(nn.Module):
    def __init__(self, f: Callable[..., object], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.randn(5, 4, dtype=dtype))
        self.b = nn.Parameter(torch.randn(5, dtype=dtype))
        self.k = nn.Parameter(torch.randn(4, 4, 3, dtype=dtype))
        self.maps = nn.Parameter(torch.randn(5, 16, 1, dtype=dtype))

    def forward(self, x: Tensor) -> object:
        return self.f(x, self.w, self.b, self.k)


class Fields(Model):
    """Vectors of 4 fields, twice."""

    def forward(self, x: Tensor) -> object:
        fields = x.unsqueeze(2) * self.w[:3].t()
        return self.f(fields, fields.tanh(), self.maps, self.b)


def optimized(model: Model, x: Tensor, gradients: bool = True) -> tuple[nn.Module, dict[str, int], list[str]]:
    """With our passes alone: the model, how often each was applied, and the operators that are left."""
    level = "full" if gradients else "first"
    fast = optimize(model, (x,), Config(verify=level, tune="off", disable=OTHERS))
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason and not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    applied = {ran.name: len(ran.changes) for ran in found.passes if ran.name in OURS and ran.changes}
    graph = fast._fxopt.entries[0].executable.graph.graph  # type: ignore[union-attr, index]
    names = [node.target._opname for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return fast, applied, names


def check(model: Model, fast: nn.Module, make: Callable[[int], Tensor], tolerance: float = 1e-5) -> None:
    for rows in (0, 1, 2, 7):
        x = make(rows)
        torch.testing.assert_close(fast(x), model(x), rtol=tolerance, atol=tolerance)
        if x.dtype is not torch.bfloat16:
            grads = [
                torch.autograd.grad(net(x).square().sum(), list(model.parameters()), allow_unused=True)
                for net in (model, fast)
            ]
            torch.testing.assert_close(grads[1], grads[0], rtol=tolerance, atol=tolerance)


LINEARS = {
    "matmul of each row": lambda x, w, b, k: torch.matmul(w, x.unsqueeze(2)).squeeze(2),
    "and a column for bias": lambda x, w, b, k: (w @ x.unsqueeze(-1) + b.unsqueeze(-1)).squeeze(-1),
    "matmul": lambda x, w, b, k: x @ w.t() + b,
    "mm of a transpose": lambda x, w, b, k: torch.mm(x, w.transpose(0, 1)),
    "mv": lambda x, w, b, k: torch.mv(x, w[0]),
    "addmm": lambda x, w, b, k: torch.addmm(b, x, w.t()),
    "einsum": lambda x, w, b, k: torch.einsum("bk,jk->bj", x, w),
    "einsum, other way round": lambda x, w, b, k: torch.einsum("jk,bk->bj", w, x),
    "einsum without an arrow": lambda x, w, b, k: torch.einsum("bk,kz", x, w.t()),
    "tensordot": lambda x, w, b, k: torch.tensordot(x.unsqueeze(2), w.t(), ([1], [0])),
    "inner": lambda x, w, b, k: torch.inner(x, w),
    "convolution of one position": lambda x, w, b, k: F.conv1d(x.unsqueeze(2), w.unsqueeze(2), b).squeeze(2),
    "product and sum": lambda x, w, b, k: (x.unsqueeze(1) * w).sum(-1),
    "product and kept sum": lambda x, w, b, k: (w * x[:, None]).sum(2, keepdim=True),
    "over two axes": lambda x, w, b, k: torch.tensordot(x.view(-1, 2, 2), w.view(5, 2, 2), ([1, 2], [1, 2])),
    "split on the way": lambda x, w, b, k: torch.einsum("bij,kij->bk", x.view(-1, 2, 2), w.view(5, 2, 2)),
    "einsum with an ellipsis": lambda x, w, b, k: torch.einsum("...k,jk->...j", x, w),
    "kernels as large as the input": lambda x, w, b, k: F.conv1d(x.unsqueeze(1), w.unsqueeze(1), b, stride=2).squeeze(
        2
    ),
    "kernels in two dims": lambda x, w, b, k: F.conv2d(x.view(-1, 1, 2, 2), w.view(5, 1, 2, 2), b).flatten(1),
    "an expanded weight": lambda x, w, b, k: torch.bmm(w.unsqueeze(0).expand(x.shape[0], -1, -1), x.unsqueeze(2)),
    "a repeated weight": lambda x, w, b, k: torch.bmm(x.unsqueeze(1), w.t().repeat(x.shape[0], 1, 1)),
    "a bias behind a linear": lambda x, w, b, k: F.linear(x, w) + b,
    "a bias of one output": lambda x, w, b, k: b[:1] + F.linear(x, w[:1]),
    "a scalar behind mv": lambda x, w, b, k: x @ w[0] + b[0],
    "a matrix a row": lambda x, w, b, k: torch.matmul(w, x.view(-1, 1, 4).expand(-1, 1, 4).transpose(1, 2)),
}


@pytest.mark.parametrize("name", LINEARS)
def test_one_linear(name: str) -> None:
    model = Model(LINEARS[name])
    fast, applied, names = optimized(model, torch.randn(6, 4))
    assert applied == {"disguised_linears": 1} and names.count("linear") == 1
    assert not {"matmul", "mm", "bmm", "einsum", "tensordot", "conv1d", "sum", "add"} & set(names)
    check(model, fast, lambda rows: torch.randn(rows, 4))
    check(model, fast, lambda rows: torch.randn(4, rows).t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["matmul of each row", "and a column for bias", "product and sum", "einsum"])
def test_other_floats(name: str, dtype: torch.dtype) -> None:
    model = Model(LINEARS[name], dtype)
    fast, applied, _ = optimized(model, torch.randn(6, 4, dtype=dtype), gradients=False)
    assert applied == {"disguised_linears": 1}
    check(model, fast, lambda rows: torch.randn(rows, 4, dtype=dtype), 1e-5 if dtype is torch.float64 else 3e-2)


def seen(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    product = x.unsqueeze(1) * w
    return product.sum(-1) + product.amax(-1)


def added_twice(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    y = w @ x.unsqueeze(2)
    return (y + b.unsqueeze(1)) * y


def edited(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    y = x * 2
    z = torch.matmul(w, y.unsqueeze(2))
    view = y[:, :2]
    view.add_(1)
    return z.squeeze(2) + y.sum(1, keepdim=True)


def test_a_bias_stays_behind_a_result_that_others_read() -> None:
    model = Model(added_twice)
    fast, applied, names = optimized(model, torch.randn(6, 4))
    assert applied == {"disguised_linears": 1} and "add" in names
    check(model, fast, lambda rows: torch.randn(rows, 4))


LEFT_ALONE = {
    "a linear, and a bias for each row": lambda x, w, b, k: F.linear(x, w) + x[:, :1],
    "a linear of one output, and a row of numbers": lambda x, w, b, k: F.linear(x, w[:1]) + b,
    "a linear with a bias, and another": lambda x, w, b, k: F.linear(x, w, b) + b,
    "linears one after the other": lambda x, w, b, k: F.linear(F.linear(x, w[:2]), w.t()[:, :2]),
    "someone reads the product": seen,
    "edited later": edited,
    "dims swapped": lambda x, w, b, k: torch.matmul(w, x.t()),
    "two batches": lambda x, w, b, k: torch.matmul(x, x.t()),
    "a diagonal": lambda x, w, b, k: torch.einsum("bii->bi", x.unsqueeze(2) * x.unsqueeze(1)),
    "a sum of copies": lambda x, w, b, k: (x.unsqueeze(1) * w[0]).expand(-1, 3, -1).sum(1),
    "a product of copies": lambda x, w, b, k: torch.einsum(
        "bck,bck->b", x[:, None].expand(-1, 3, -1), w[:1].expand(1, 4)[:, None].expand(x.shape[0], 3, 4)
    ),
    "summed in one factor only": lambda x, w, b, k: torch.einsum("bk,jl->bj", x, w),
    "kernels over parts": lambda x, w, b, k: F.conv1d(x.unsqueeze(1), w.unsqueeze(1)[..., :2], b, stride=2),
    "kernels over padding": lambda x, w, b, k: F.conv1d(x.unsqueeze(1), w.unsqueeze(1), b, padding=2),
    "kernels over the rows of one image": lambda x, w, b, k: (
        F.conv2d(k.view(1, 1, 4, 12)[..., :5], w.view(5, 1, 4, 1), b) + x.sum()
    ),
    "integers": lambda x, w, b, k: x.long() @ torch.ones(4, 2, dtype=torch.long) + 0 * w.sum(),
    "complex": lambda x, w, b, k: torch.view_as_real(
        torch.matmul(w.to(torch.complex64), x.to(torch.complex64)[:, :, None])
    ),
    "another dtype": lambda x, w, b, k: (x.double().unsqueeze(1) * w).sum(-1),
    "a sum of another dtype": lambda x, w, b, k: (x.unsqueeze(1) * w).sum(-1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_stays(name: str) -> None:
    model = Model(LEFT_ALONE[name])
    fast, applied, _ = optimized(model, torch.randn(6, 4), gradients=False)
    assert not applied
    for rows in (1, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x.clone()), model(x.clone()))


def outer(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    p, q = (x.unsqueeze(2) * w[0, :i].repeat(1, 1, 2)[..., :4] for i in (2, 2))
    inner = (p[:, [0, 0, 1]].unsqueeze(1) * k.transpose(1, 2)).sum(-1).transpose(2, 1)
    return (inner * q[:, [1, 2, 2]]).sum(-1)


def in_a_bad_order(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bk,bl,jl->bkj", x, torch.cat([x] * 3, 1), w[:2].repeat(1, 3))


def column_times_scalar(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(x.unsqueeze(2), (x @ w[0]).view(-1, 1, 1)).squeeze(2)


def a_matrix_a_field(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    return torch.matmul((x.unsqueeze(2) * b[:4]).tanh().unsqueeze(2), k).squeeze(2)


def a_matrix_a_field_from_the_left(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(k.mT, (x.unsqueeze(2) * b[:4]).tanh().unsqueeze(-1)).squeeze(-1)


def fields_by_fields(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    left, right = x.unsqueeze(2) * w[0, :3], x.unsqueeze(2) * w[1, :3]
    return (left.unsqueeze(2) * right.unsqueeze(1)).sum(-1)


def read_twice_through_a_view(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
    """MIND's capsules: the product stands once, for both of its readers."""
    fields = x.unsqueeze(2) * w[0, :3]
    mapped = (k * fields.unsqueeze(2)).sum(3).transpose(1, 2).contiguous()
    return torch.bmm(torch.bmm(fields.mT, mapped).tanh(), mapped)


@pytest.mark.parametrize(
    ("f", "gone"),
    [
        (outer, {"bmm"}),
        (read_twice_through_a_view, {"bmm"}),
        (in_a_bad_order, {"linear"}),
        (column_times_scalar, set()),
        (a_matrix_a_field, {"bmm"}),
        (a_matrix_a_field_from_the_left, {"bmm"}),
        (fields_by_fields, {"bmm"}),
    ],
)
def test_products_are_not_written_out(f: Callable, gone: set[str]) -> None:
    model = Model(f)
    fast, applied, names = optimized(model, torch.randn(6, 4))
    assert applied.get("contractions") == 1 and gone <= set(names) and "matmul" not in names
    check(model, fast, lambda rows: torch.randn(rows, 4), 1e-4)


WRITTEN_OUT: dict[str, Callable[..., Tensor]] = {
    "einsum": lambda s, w, v: torch.einsum("bij,ijd,bjd->bid", s, w, v),
    "operators": lambda s, w, v: (s.unsqueeze(-1) * w * v.unsqueeze(1)).sum(2),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_product_as_large_in_any_order_is_made_of_some_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_CHUNK", 1)  # 16 rows, the fewest
    product = WRITTEN_OUT[name]
    model = Fields(lambda v, u, k, b: product(v @ u.mT, k[:3].view(4, 4, 3), u).flatten(1) @ k[3:].view(16, 2)[:12])
    fast, applied, names = optimized(model, torch.randn(6, 4))
    assert applied.get("contractions") == 1 and not {"einsum", "sum"} & set(names)
    check(model, fast, lambda rows: torch.randn(rows * rows, 4), 1e-4)


COMPRESSED = {
    "einsum and convolution": lambda v, u, k, b: F.conv1d(torch.einsum("bhd,bmd->bhmd", v, u).flatten(1, 2), k, b),
    "broadcast and convolution": lambda v, u, k, b: F.conv1d((v.unsqueeze(2) * u.unsqueeze(1)).view(-1, 16, 3), k, b),
    "matmul, dims in front": lambda v, u, k, b: (
        torch.matmul(v.transpose(1, 2).unsqueeze(3), u.transpose(1, 2).unsqueeze(2)).flatten(2) @ k.squeeze(2).t()
    ),
    "linear": lambda v, u, k, b: F.linear(
        (v.transpose(1, 2).unsqueeze(3) * u.transpose(1, 2).unsqueeze(2)).flatten(2), k.squeeze(2), b
    ).transpose(1, 2),
    "one einsum": lambda v, u, k, b: torch.einsum("bhd,bmd,ohm->bod", v, u, k.view(5, 4, 4)) @ b[:3],
    "bilinear": lambda v, u, k, b: F.bilinear(v.flatten(1)[:, :4], u.flatten(1)[:, 1:5], k.view(5, 4, 4), b),
    "the other order": lambda v, u, k, b: torch.einsum("bhd,bmd,omh->bdo", v, u, k.view(5, 4, 4)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_interactions(name: str) -> None:
    model = Fields(COMPRESSED[name])
    fast, applied, names = optimized(model, torch.randn(6, 4))
    assert applied.get("compressed_interaction") == 1 and "compressed_interaction" in names
    check(model, fast, lambda rows: torch.randn(rows, 4), 1e-4)


class AgainstAllRows(nn.Module):
    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("bl,bld->bd", v, x) @ v.mT


def test_a_product_with_all_rows_is_not_made_of_some() -> None:
    """Two axes have the size of the batch, and of one a chunk has fewer."""
    model = AgainstAllRows()
    optimized = optimize(model, config=Config(verify="off", tune="off"))
    with looking(pretended=True):  # as a large batch is computed
        for batch in (4, 2, 7):
            v, x = torch.randn(batch, 5), torch.randn(batch, 5, 5)
            torch.testing.assert_close(optimized(v, x), model(v, x))
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None, entry.findings.eager_reason


def test_weights_are_read_at_each_call() -> None:
    model = Model(LINEARS["and a column for bias"])
    fast, _, _ = optimized(model, torch.randn(6, 4))
    x = torch.randn(3, 4)
    with torch.no_grad():
        model.w.data = torch.randn(4, 5).t()  # transposed, and a version that nobody bumps
    torch.testing.assert_close(fast(x), model(x))
