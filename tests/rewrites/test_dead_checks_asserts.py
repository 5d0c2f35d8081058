"""Asserts go where they always hold, and raise as eager does where they may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxopt import optimize
from tests.rewrites.dead import Guarded, floats, ids, run

CLAMPED = "clamp(0, 100) stays: ids may be any int64"
ALWAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda i: (i >= 0).all(),
    "not_any": lambda i: ~(i < 0).any(),
    "both": lambda i: ((i >= 0) & (i <= 100)).all(),
    "all_of_one_dim": lambda i: torch.all(i >= 0, dim=0),
}


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("message", [(), ("a negative id",)])
def test_an_assert_that_always_holds_goes(name: str, message: tuple[str, ...]) -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        torch.ops.aten._assert_async(ALWAYS[name](i), *message)
        return m.emb(i)

    done = run(asserted)
    assert done.what == ["assert removed"]
    assert done.why[0].startswith("it always holds: ") and "bucketize over 100 edges" in done.why[0]
    assert "_assert_async" in done.gone


def by_torch_assert(i: Tensor) -> None:
    torch._assert((i >= 0).all(), "a negative id")


def by_assert(i: Tensor) -> None:
    assert bool((i >= 0).all()) and i.min() >= 0


def by_raise(i: Tensor) -> None:
    if i.max() > 100 or (i < 0).any():
        raise ValueError(f"{i.max()} is too large")


@pytest.mark.parametrize("asserts", [by_torch_assert, by_assert, by_raise])
def test_what_python_asks_leaves_no_operator(asserts: Callable[[Tensor], None]) -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        asserts(i)
        return m.emb(i)

    model = Guarded(asserted).eval()
    with torch.no_grad():
        fast = optimize(model, (floats(6),))
        for batch in (1, 2, 40):
            x = floats(batch)
            assert torch.equal(fast(x), model(x))  # type: ignore[arg-type]
    (findings,) = fast._fxopt.findings
    assert not findings.eager_reason and findings.operators_after == 1


@pytest.mark.parametrize("message", [(), ("an id above 100",)])
def test_an_assert_that_may_fail_raises_as_eager_does(message: tuple[str, ...]) -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        torch.ops.aten._assert_async((x <= 100).all(), *message)
        return m.emb(x.clamp(0, 100))

    model = Guarded(asserted).eval()
    with torch.no_grad():
        fast = optimize(model, (torch.arange(6),))
        x = torch.arange(60)
        assert torch.equal(fast(x), model(x))  # type: ignore[arg-type]
        for net in (model, fast):
            with pytest.raises(RuntimeError, match="Expected Tensor" if not message else "above 100"):
                net(torch.tensor([3, 101]))
    (ran,) = (ran for ran in fast._fxopt.findings[0].passes if ran.name == "dead_checks")
    assert [miss.reason for miss in ran.misses] == ["the assert stays: bools may be any bool", CLAMPED]


def test_an_assert_of_an_edited_mask_stays() -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        holds = (i >= 0).all()
        holds.logical_and_((x == x).all())
        torch._assert_async(holds)
        return m.emb(i)

    model = Guarded(asserted).eval()
    with torch.no_grad():
        fast = optimize(model, (torch.randn(6),))
        for net in (model, fast):
            net(torch.randn(4))
            with pytest.raises(RuntimeError):
                net(floats(40))


def test_metadata_of_the_capture() -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        i = m.bucket(x)
        torch.ops.aten._assert_tensor_metadata(i, dtype=torch.int64, device=torch.device("cpu"))
        return m.emb(i)

    assert run(asserted).what == ["metadata assert removed"]


def test_metadata_that_is_wrong_raises() -> None:
    def asserted(m: Guarded, x: Tensor) -> Tensor:
        torch.ops.aten._assert_tensor_metadata(x, None, None, torch.int32)
        return x + 1

    for net in (model := Guarded(asserted), optimize(model)):
        with pytest.raises(RuntimeError, match="dtype"):
            net(ids(5))
