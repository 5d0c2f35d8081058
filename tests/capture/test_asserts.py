"""Python that asks about data: what value ranges prove costs nothing, and other checks are asked by the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import Capture, CaptureError, capture
from fxopt.runtime import dispatcher_of
from fxopt.shape.conditions import require

Check = Callable[[Tensor], object]


def _raise_if(wrong: object) -> None:
    if wrong:
        raise ValueError("wrong ids")


class Checked(nn.Module):
    """Rows of a table, by ids in [0, 100] that are checked first."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self.table = nn.Embedding(101, 4)
        self.check = check
        self.register_buffer("edges", torch.linspace(-2, 2, 100))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.bucketize(x, self.edges)
        self.check(ids)
        return self.table(ids) * 2


def captured(check: Check) -> Capture:
    return capture(Checked(check).eval(), (torch.zeros(6),))


def targets(found: Capture) -> list[object]:
    return [node.target for node in found.graph.graph.nodes]


@pytest.mark.parametrize(
    "check",
    [
        lambda i: torch._assert((i >= 0).all(), "negative"),
        lambda i: torch._assert(torch.all(i <= 100), message="large"),
        lambda i: _raise_if(not (i >= 0).all()),
        lambda i: _raise_if(not bool((i >= 0).all())),
        lambda i: _raise_if((i < 0).any()),
        lambda i: _raise_if((i < 0).any().item()),
        lambda i: _raise_if(i.max() > 100),
        lambda i: _raise_if(i.max().item() > 100),
        lambda i: _raise_if(int(i.sum() * 0) != 0),
        lambda i: _raise_if(i.min().item() < 0 or i.max().item() >= 101),
    ],
)
def test_what_is_proved_is_no_reason_to_stay_eager(check: Check) -> None:
    found = captured(check)
    assert torch._assert not in targets(found)
    model = Checked(check).eval()
    x = torch.randn(9)
    assert torch.equal(fxopt.optimize(model, (torch.randn(6),))(x), model(x))


@pytest.mark.parametrize(
    "check",
    [
        lambda i: _raise_if((i < 1).any()),
        lambda i: _raise_if(i.max() > 99),
        lambda i: _raise_if(i.max().item() > 99),
        lambda i: _raise_if(i.float().mean().item() > 500),  # a mean may be rounded
        lambda i: _raise_if((i.clone().sub_(1) < 0).any()),
        lambda i: _raise_if((i * 2**60 < 0).any()),
    ],
)
def test_what_is_not_proved_is_asked_at_each_call(check: Check) -> None:
    found = captured(check)
    assert require in targets(found)
    model = Checked(check).eval()
    optimized = fxopt.optimize(model, (torch.zeros(6),))
    raised = [_error_of(each, torch.tensor([-9.0, 0.0, 9.0])) for each in (model, optimized)]
    assert raised[0] == raised[1]


def _error_of(model: nn.Module, x: Tensor) -> str:
    try:
        model(x)
    except ValueError as error:
        return str(error)
    return ""


def test_numbers_still_depend_on_data() -> None:
    def branch(ids: Tensor) -> int:
        return 1 if int(ids.max()) > 5 else 2

    with pytest.raises(CaptureError, match=r"depends on data; \.item\(\) in place of int\(\)"):
        captured(branch)


def test_an_edit_in_place_is_seen() -> None:
    """What was known of a view before its base was edited is not known after."""

    def check(ids: Tensor) -> None:
        copy = ids.clone()
        view = copy[1:]
        _raise_if((view < 0).any())
        copy.sub_(7)
        _raise_if((view < 0).any())

    assert targets(captured(check)).count(require) == 1


class Asserting(nn.Module):
    """Rows of a table of 10, by ids that an assert bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        torch._assert((ids >= 0).all(), "ids must not be negative")
        rows = self.table(ids)
        torch._assert((ids < 8).all(), "ids below 8 only")
        return torch.cat([rows, self.table(ids * 1)], 1)


def test_an_assert_that_is_not_proved_stays() -> None:
    model = Asserting().eval()
    optimized = fxopt.optimize(model, (torch.arange(8),))
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None
    assert targets(entry.executable.capture).count(torch._assert) == 2
    for ids in (torch.arange(5), torch.arange(0), torch.tensor([7])):
        assert torch.equal(optimized(ids), model(ids))


@pytest.mark.parametrize("ids", [[0, -1], [8], [9, 8], [-1, 99], [99, 3]])
def test_errors_are_those_of_eager(ids: list[int]) -> None:
    model, given = Asserting().eval(), torch.tensor(ids)
    optimized = fxopt.optimize(model, (torch.arange(8),))
    with pytest.raises((AssertionError, IndexError)) as expected:
        model(given)
    with pytest.raises(expected.type) as found:
        optimized(given)
    if expected.type is AssertionError:
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "check",
    [
        lambda i: torch._check(i.max().item() <= 60),
        lambda i: torch._check_value(i.sum().item() < 90, lambda: "too many"),
        lambda i: torch._check_tensor_all((i >= 0) & (i < 61)),
        lambda i: torch._check(i.min().item() != 3),
    ],
)
def test_a_check_of_torch_stays(check: Check) -> None:
    class Model(Checked):
        def forward(self, x: Tensor) -> Tensor:
            self.check(x)
            return self.table(x) * 2

    model = Model(check).eval()
    optimized = fxopt.optimize(model, (torch.arange(2, 5),))
    assert torch.equal(optimized(torch.arange(2, 6)), model(torch.arange(2, 6)))
    for wrong in ([62, 30, 3], [100, 3]):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            model(torch.tensor(wrong))
        with pytest.raises(expected.type):
            optimized(torch.tensor(wrong))
    assert optimized._fxopt.findings[0].eager_reason == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "check",
    [
        lambda i: torch._check(i[i < 61].shape[0] == i.shape[0]),
        lambda i: torch._check(i.min().item() == 50),
        lambda i: torch._check(i[i < 61].shape[0] * 2 == i.shape[0] + i[i > 2].shape[0]),
    ],
)
@torch.no_grad()
def test_an_equality_that_the_trace_takes_for_granted_is_asked_at_every_call(check: Check) -> None:
    class Model(Checked):
        def forward(self, x: Tensor) -> Tensor:
            self.check(x)
            return self.table(x) * 2

    model = Model(check).eval()
    optimized = fxopt.optimize(model, (torch.tensor([60, 50, 50]),))
    assert torch.equal(optimized(torch.tensor([50, 60])), model(torch.tensor([50, 60])))
    for wrong in ([62, 30, 3], [70, 70]):
        with pytest.raises(RuntimeError) as expected:
            model(torch.tensor(wrong))
        with pytest.raises(expected.type) as found:
            optimized(torch.tensor(wrong))
        assert str(found.value) == str(expected.value)
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None


def test_a_mask_is_no_condition() -> None:
    """Eager refuses to assert many elements at once, proved or not."""
    model = Checked(lambda i: torch._assert(i >= 0, "many")).eval()
    optimized = fxopt.optimize(model)
    with pytest.raises(RuntimeError, match="ambiguous"):
        optimized(torch.randn(6))
