"""Fewer bits and lower ranks: only when asked for, held to the error that was allowed, and never stale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.kernels.compressed.op import linear
from tests.rewrites.test_catalogue import applied


class Tower(nn.Module):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(40_000, 32), nn.Embedding(10, 4)
        self.wide, self.top = nn.Linear(260, 192), nn.Linear(192, 3)
        if rank:
            with torch.no_grad():
                self.wide.weight.copy_(torch.randn(192, rank) @ torch.randn(rank, 260) / 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.wide(torch.cat([self.table(ids).flatten(1), self.other(ids[:, 0] % 10)], 1)).relu())


IDS = torch.randint(0, 40_000, (16, 8))


def optimized(model: nn.Module, **options: object) -> nn.Module:
    with torch.no_grad():
        return fxopt.optimize(model.eval(), (IDS,), fxopt.Config(tune="off", **options))  # type: ignore[arg-type]


def share(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.01), ("int8", 0.03)])
@torch.no_grad()
def test_within_the_error_that_is_allowed(precision: str, error: float) -> None:
    model = Tower()
    fast = optimized(model, precision=precision, max_error=error)
    assert applied(fast, "compressed_linears") == 1 and applied(fast, "compressed_tables") == 1
    for batch in (0, 1, 2, 65):
        ids = torch.randint(0, 40_000, (batch, 8))
        expected, found = model(ids), fast(ids)
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert not batch or 0 < share(found, expected) < 2 * error


@torch.no_grad()
def test_what_errs_more_is_rolled_back_and_named() -> None:
    model = Tower()
    fast = optimized(model, precision="int8", max_error=1e-6)
    rolled = [change for ran in fast._fxopt.findings[0].passes for change in ran.rolled_back]
    assert {"in int8" in change.what or "in bf16" in change.what for change in rolled} == {True}
    assert "allowed 1e-06" in rolled[0].why
    torch.testing.assert_close(fast(IDS), model(IDS))


@torch.no_grad()
def test_low_rank_where_the_weight_has_one() -> None:
    model = Tower(rank=5)
    fast = optimized(model, low_rank=0.01)
    (change,) = next(ran for ran in fast._fxopt.findings[0].passes if ran.name == "compressed_linears").changes
    assert change.what.endswith("rank 5")
    assert share(fast(IDS), model(IDS)) < 1e-4


@torch.no_grad()
def test_full_rank_stays() -> None:
    fast = optimized(Tower(), low_rank=0.01)
    assert not applied(fast, "compressed_linears")


@pytest.mark.parametrize("edit", ["step", "data", "load_state_dict", "new tensor"])
@torch.no_grad()
def test_weights_that_change_take_effect(edit: str) -> None:
    model = Tower()
    fast = optimized(model, precision="int8", max_error=0.05)
    fast(IDS)
    if edit == "step":
        model.wide.weight.mul_(-3.0)
    elif edit == "data":
        model.wide.weight.data.mul_(-3.0)
        model.table.weight.data.mul_(2.0)
    elif edit == "load_state_dict":
        model.load_state_dict(Tower().state_dict())
    else:
        model.wide.weight = nn.Parameter(torch.randn(192, 260))
    assert share(fast(IDS), model(IDS)) < 0.05


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_steps_of_fused_optimizers_take_effect(kind: type[torch.optim.Optimizer]) -> None:
    """They edit weights without counting a version up, and Adagrad those rows of a table alone that were looked up."""
    model = Tower()
    fast = optimized(model, precision="bf16", max_error=0.02)
    optimizer = kind(model.parameters(), lr=0.5, fused=True)  # type: ignore[call-arg]
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert share(fast(IDS), model(IDS)) < 0.05


@torch.no_grad()
def test_rows_that_int8_cannot_hold() -> None:
    model = Tower()
    fast = optimized(model, precision="int8", max_error=0.05)
    model.table.weight[3, 0] = float("inf")
    ids = IDS.clone()
    ids[0, 0] = 3
    torch.testing.assert_close(fast(ids)[0], model(ids)[0], equal_nan=True, rtol=0.05, atol=0.05)


def test_training_is_exact() -> None:
    model = Tower()
    fast = fxopt.optimize(model, (IDS,), fxopt.Config(precision="bf16", tune="off"))
    assert not applied(fast, "compressed_linears")
    assert (
        "inference"
        in next(ran for ran in fast._fxopt.findings[0].passes if ran.name == "compressed_linears").misses[0].reason
    )
    torch.testing.assert_close(fast(IDS), model(IDS))


@pytest.mark.parametrize("options", [{"precision": "fp4"}, {"low_rank": 2.0}, {"precision": "bf16", "verify": "off"}])
def test_options_that_are_none(options: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        fxopt.Config(**options)


def test_operators() -> None:
    from fxopt.kernels.compressed.op import OPERATORS

    OPERATORS.load()
    x, weight, bias = torch.randn(5, 256), torch.randn(192, 256), torch.randn(192)
    torch.library.opcheck(torch.ops.fxopt.compressed_linear.default, (x, weight, bias, "bf16", 0))
    torch.library.opcheck(torch.ops.fxopt.compressed_table.default, (weight, torch.bfloat16))


@torch.no_grad()
def test_formats_of_tables() -> None:
    from fxopt.rewrites.row_formats import Use, rows_of, told

    table, narrow = torch.randn(5000, 32), torch.randn(5000, 7)
    infinite, huge = table.clone(), table.clone()
    infinite[3, 3], huge[3, 3] = float("inf"), torch.finfo(torch.float32).max
    found = [rows_of(t, "int8", (), timed=False) for t in (table, narrow, infinite, huge)]
    assert [rows.format for rows in found] == ["int8", "bf16", "bf16", ""]
    assert found[0].after == 5000 * 48 and 0 < found[0].error < 0.03 and not found[3].pays
    assert "1 table in int8" in told(found) and "2 tables in bf16" in told(found) and "fit no fewer" in told(found)
    for use in (Use("none", False, False), Use("sum", True, True), Use("max", False, False)):
        assert rows_of(table, "int8", (use,), timed=True).gain > 0  # type: ignore[operator]


@torch.no_grad()
def test_rows_near_infinity_are_not_summed_in_int8() -> None:
    weight, x = torch.rand(64, 64) * 1e-3, torch.randn(4, 64)
    weight[5] = 1e-39
    for rows in (x, x * 1e35, x * (3e38 / x.abs().max())):
        found, expected = linear(rows, weight, None, "int8", 0), rows @ weight.T
        assert ((found - expected).abs().max() / expected.abs().max()) < 0.02
