"""Checks that may change something stay, with a reason, and the results are eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from tests.rewrites.dead import ALONE, Guarded, floats, ids, run

EDGES = 100

Case = tuple[Callable[[Guarded, Tensor], Tensor], str]

# A check of ids (by bucketize, in [0, 100], unless it takes raw ones) that must stay, and its operator.
FROM_FLOATS: dict[str, Case] = {
    "where_len_minus_1": (lambda m, x: torch.where(m.bucket(x) <= EDGES - 1, m.bucket(x), 0), "where"),
    "clamp_len_minus_1": (lambda m, x: m.bucket(x).clamp(0, EDGES - 1), "clamp"),
    "clamp_above_0": (lambda m, x: m.bucket(x).clamp(min=1), "clamp"),
    "masked_fill_0": (lambda m, x: m.bucket(x).masked_fill(m.bucket(x) == 0, 5), "masked_fill"),
    "remainder_len": (lambda m, x: m.bucket(x) % EDGES, "remainder"),
    "bit_mask_too_narrow": (lambda m, x: m.bucket(x) & 63, "__and__"),
    "bit_mask_with_a_hole": (lambda m, x: m.bucket(x) & 0b1111101, "__and__"),
    "filter_len_minus_1": (lambda m, x: m.bucket(x)[m.bucket(x) < EDGES], "index"),
    "nonzero_positive": (lambda m, x: m.bucket(x)[torch.nonzero(m.bucket(x) > 0).squeeze(1)], "nonzero"),
    "masked_select_positive": (lambda m, x: torch.masked_select(m.bucket(x), m.bucket(x) != 0), "masked_select"),
    "or_of_conditions": (
        lambda m, x: torch.where((m.bucket(x) >= 0) & (m.bucket(x) < EDGES), m.bucket(x), 0),
        "where",
    ),
    "condition_on_another_tensor": (lambda m, x: torch.where(x > 0, m.bucket(x), 0), "where"),
    "filter_by_another_tensor": (lambda m, x: m.bucket(x)[x >= -1e30], "index"),
    "float_0.5": (lambda m, x: torch.where(m.bucket(x).float() > 0.5, m.bucket(x), 7), "where"),
    "float_clamp_0.5": (lambda m, x: m.bucket(x).float().clamp(min=0.5), "clamp"),
    "relu_of_any_float": (lambda m, x: F.relu(x), "relu"),
    "clamp_of_minus_zero": (lambda m, x: x.abs().neg().clamp(max=0.0), "clamp"),
    "abs_of_minus_zero": (lambda m, x: x.clamp(min=0.0).abs(), "abs"),
    "relu_of_minus_zero": (lambda m, x: x.clamp(-0.0, 1.0).relu(), "relu"),
    "maximum_of_minus_zero": (lambda m, x: torch.maximum(x.abs().neg().nan_to_num(), x.new_full((), -3e38)), "maximum"),
    "nan_to_num_of_quotient": (lambda m, x: torch.nan_to_num(m.bucket(x) / m.bucket(x)), "nan_to_num"),
    "nan_to_num_of_rows": (lambda m, x: torch.nan_to_num(m.emb(m.bucket(x))), "nan_to_num"),
    "floor_of_halves": (lambda m, x: (m.bucket(x) / 2).floor(), "floor"),
    "integer_times_1.0": (lambda m, x: m.bucket(x) * 1.0, "mul"),
    "integer_times_mask_of_floats": (lambda m, x: m.bucket(x) * (m.bucket(x) >= 0).float(), "mul"),
    "broadcasting_zeros": (
        lambda m, x: torch.where((m.bucket(x) < 0).unsqueeze(1), x.new_zeros(3), x.unsqueeze(1)),
        "where",
    ),
    "broadcasting_mask": (lambda m, x: torch.where((m.bucket(x) >= 0).unsqueeze(1), m.bucket(x), 0), "where"),
    "promotion_by_the_other": (lambda m, x: torch.where(m.bucket(x) < 0, 0.5, m.bucket(x)), "where"),
    "promotion_by_a_bound": (lambda m, x: m.bucket(x).int().clamp(torch.tensor([0]), torch.tensor([2**40])), "clamp"),
    "wrapping_bound": (lambda m, x: (m.bucket(x) - 50).to(torch.int8).clamp(min=-50, max=49), "clamp"),
    "rounding_bound": (lambda m, x: (x * 0 + 0.1).nan_to_num().clamp(max=0.1), "clamp"),
    "unique_of_other_ids": (
        lambda m, x: m.emb(torch.unique(m.bucket(x + 1))[torch.unique(m.bucket(x), return_inverse=True)[1] * 0]),
        "_unique2",
    ),
}
FROM_IDS: dict[str, Case] = {
    "where_on_raw_ids": (lambda m, x: torch.where(x < 0, 0, x), "where"),
    "where_on_raw_ids_both": (lambda m, x: torch.where((x < 0) | (x > 100), 0, x), "where"),
    "remainder_by_a_negative": (lambda m, x: (x % -100).clamp(0, 99), "clamp"),
    "remainder_by_a_tensor": (lambda m, x: (x % (x.abs() % 7 + 1)).clamp(0, 3), "clamp"),
    "remainder_after_remainder": (lambda m, x: x % 101 % 100, "remainder"),
    "remainder_by_a_sign": (lambda m, x: x % 100 % -100, "remainder"),
    "fmod": (lambda m, x: torch.fmod(x, 100).clamp(0, 99), "clamp"),
    "fmod_then_abs": (lambda m, x: torch.fmod(x, 100).abs(), "abs"),
    "fmod_then_remainder": (lambda m, x: torch.fmod(x, 100) % 100, "remainder"),
    "abs_of_the_smallest": (lambda m, x: x.abs().clamp(min=0), "clamp"),
    "abs_then_remainder": (lambda m, x: torch.fmod(x.abs(), 100).clamp(min=0), "clamp"),
    "narrowing": (lambda m, x: (x & 0xFFFFFFFF).int().clamp(min=0), "clamp"),
    "narrowing_to_int8": (lambda m, x: (x % 1000).to(torch.int8).clamp(min=0), "clamp"),
    "hash_above_2**31": (lambda m, x: (x % (2**32)).int().relu(), "relu"),
    "hash_that_wraps": (lambda m, x: ((x % (2**31)) * (2**33 + 1)).clamp(min=0), "clamp"),
    "sum_that_wraps": (lambda m, x: (x.clamp(min=0) + 1).clamp(min=1), "clamp"),
    "negation_that_wraps": (lambda m, x: (-x.clamp(max=0)).abs(), "abs"),
    "filter_of_raw_ids": (lambda m, x: x[x >= 0], "index"),
    "float_of_large_ids": (lambda m, x: torch.where(x.clamp(0, 2**24 + 3).float() > 2**24 + 2, 1, x), "where"),
    "not_of_ids": (lambda m, x: (~(x % 100)).clamp(min=0), "clamp"),
}


@pytest.mark.parametrize("name", FROM_FLOATS)
def test_a_check_of_computed_ids_stays(name: str) -> None:
    check, operator = FROM_FLOATS[name]
    assert operator in run(check).operators


@pytest.mark.parametrize("name", FROM_IDS)
def test_a_check_of_raw_ids_stays(name: str) -> None:
    check, operator = FROM_IDS[name]
    assert operator in run(check, ids).operators


def test_reasons() -> None:
    ranged = "ids are in [0, 100] from bucketize over 100 edges"
    assert run(FROM_FLOATS["where_len_minus_1"][0]).stays == [f"where(ids <= 99, ids, 0) stays: {ranged}"]
    assert run(FROM_FLOATS["clamp_above_0"][0]).stays == [f"clamp(min=1) stays: {ranged}"]
    assert run(FROM_IDS["where_on_raw_ids"][0], ids).stays == ["where(ids < 0, 0, ids) stays: ids may be any int64"]
    filtered = run(FROM_FLOATS["filter_len_minus_1"][0]).stays
    assert filtered == [f"the filter ids[ids < 100] stays, its size depends on data: {ranged}"]
    assert run(lambda m, x: F.relu(x) + x.clamp(0, 1)).stays == [], "activations are no checks"


def test_where_on_raw_ids_is_folded_into_the_lookup() -> None:
    def guarded(m: Guarded, x: Tensor) -> Tensor:
        return torch.cat([m.emb(torch.where(i < 0, 0, i).clamp(max=100)) for i in x.unbind(1)], 1)

    model = Guarded(guarded).eval()
    with torch.no_grad():
        fast, x = optimize(model, (ids(6, 3),)), ids(40, 3)
        assert torch.equal(fast(x), model(x))  # type: ignore[arg-type]
    assert fast._fxopt.findings[0].operators_after == 1


def test_an_inverse_with_a_padding_keeps_its_gradient() -> None:
    class Model(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            u, inverse = torch.unique(self.bucket(x), return_inverse=True)
            return F.embedding(inverse, self.emb(u), padding_idx=0)

    model, x = Model(lambda m, x: x), floats(20)
    fast = optimize(model, (x,))
    found, expected = (torch.autograd.grad(net(x).sum(), model.emb.weight)[0] for net in (fast, model))
    assert torch.equal(found, expected)


# In-place edits: the check reads what was there before, or its result is edited.


def edited_before(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    i.add_(50)
    return i.clamp(0, 100)


def edited_after(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    checked = i.clamp(0, 100)
    i.sub_(60)
    return checked + i.clamp(0, 100)


def result_edited(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    checked = i.clamp(0, 100)
    checked.sub_(60)
    return i + checked.clamp(0, 100)


def clone_edited(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    checked = i.clamp(0, 100).clone()
    checked.sub_(60)
    return i + checked.clamp(0, 100)


def view_edited(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    checked = i.clamp(0, 100)
    i.unsqueeze(1).mul_(-1)
    return checked + i.clamp(0, 100)


def mask_edited(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    keep = i >= 0
    keep.logical_and_(x > 0)
    return torch.where(keep, i, 0)


def filtered_edited(m: Guarded, x: Tensor) -> Tensor:
    i = m.bucket(x)
    kept = i[i >= 0]
    kept.add_(1)
    return i + kept


EDITS = (edited_before, edited_after, result_edited, clone_edited, view_edited, mask_edited, filtered_edited)


@pytest.mark.parametrize("f", EDITS)
def test_in_place_edits(f: Callable[[Guarded, Tensor], Tensor]) -> None:
    run(f)


def test_an_opaque_module_may_edit_what_it_is_given() -> None:
    class Edits(nn.Module):
        def forward(self, i: Tensor) -> Tensor:
            return i.sub_(60)

    class Model(Guarded):
        def __init__(self) -> None:
            super().__init__(lambda m, x: x)
            self.leaf = Edits()

        def forward(self, x: Tensor) -> Tensor:
            i = self.bucket(x)
            edited = self.leaf(i.clamp(0, 100))
            return edited + i.clamp(0, 100)

    model, x = Model().eval(), floats(40)
    with torch.no_grad():
        fast = optimize(model, (floats(6),), Config(leaves=("leaf",)))
        assert torch.equal(fast(x), model(x))


# A tensor whose strides differ from those of the check's result: a later view would notice.


@pytest.mark.parametrize("disable", [(), ALONE])
def test_strides_that_a_later_view_needs(disable: tuple[str, ...]) -> None:
    def viewed(m: Guarded, x: Tensor) -> tuple[Tensor, ...]:
        i = m.bucket(x)  # [B, 5]
        part = i[:, 1:4].clamp(0, 100).view(-1)
        wide = i[:, :1].expand(-1, 4).abs().view(-1)
        return part, wide, x.to(torch.uint8).long().abs().view(-1)

    model = Guarded(viewed).eval()
    with torch.no_grad():
        fast = optimize(model, (torch.rand(6, 5),), Config(disable=disable))
        for x in (torch.rand(7, 5), torch.rand(7, 9)[:, 2:7], torch.rand(5, 7).t().contiguous()):
            for found, expected in zip(fast(x), model(x), strict=True):  # type: ignore[call-overload]
                assert torch.equal(found, expected)


# With gradients: the gradient of a check is not always the gradient of its operand.


@pytest.mark.parametrize(
    "check",
    [
        lambda x: x.square().relu(),
        lambda x: torch.maximum(x.square(), torch.zeros_like(x)),
        lambda x: (x * 0 + 3).floor() + x,
        lambda x: x.floor().round() * x,
        lambda x: torch.sigmoid(x).clamp(0.0, 1.0),
        lambda x: x.square().abs(),
    ],
)
def test_gradients(check: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return check(x)

    x = torch.tensor([-2.0, -0.0, 0.0, 0.5, 3.0, 40.0], requires_grad=True)
    fast = optimize(Model(), (x,))
    found, expected = (torch.autograd.grad(net(x).sum(), x)[0] for net in (fast, Model()))
    assert torch.equal(found, expected)


def test_a_branch_that_is_never_taken_gets_zeros_for_a_gradient() -> None:
    class Model(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            i = self.bucket(x)
            return torch.where((i >= 0).unsqueeze(1), self.emb(i), self.bag.weight[:1])

    model, x = Model(lambda m, x: x), floats(6)
    fast = optimize(model, (x,))
    found = torch.autograd.grad(fast(x).sum(), (model.emb.weight, model.bag.weight))
    assert torch.equal(found[1], torch.zeros_like(found[1]))
