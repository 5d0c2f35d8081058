"""A call of an autograd.Function is one call in the graph: its backward is kept, and all around it is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import capture
from fxopt.capture.autograd_functions import FunctionCall
from fxopt.torch_internals.seeds import seed_started


class Reverse(torch.autograd.Function):
    """Of domain adaptation: a view of its input, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.alpha * grad, None


class Round(torch.autograd.Function):
    """A straight-through estimator, as one with a function of its own for what backward needs."""

    @staticmethod
    def forward(x: Tensor, step: float) -> Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0].abs() < 1), None


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape[0], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad


class Several(torch.autograd.Function):
    """Tensors of other sizes, a number and a name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x.t() @ y, 3, "name"

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, *rest: None) -> Any:
        x, y = ctx.saved_tensors
        return first * y + y @ second.t(), 2 * first * x + x @ second


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 5 * grad


class Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 7 * grad


class Inner(torch.autograd.Function):
    """Keeps a graph of its own for backward, with another function in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Reverse.apply(ctx.x.sin(), 0.5)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(ctx.y, ctx.x, grad)


KEPT = Reverse.apply


def made() -> type[torch.autograd.Function]:
    class Made(Reverse):
        pass

    return Made


def several(h: Tensor) -> Tensor:
    product, square, number, name = Several.apply(h, h.tanh())
    return product @ square + number * len(name)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda h: Reverse.apply(h, 0.5),
    "a straight-through estimator": lambda h: Round.apply(h, 0.1),
    "random numbers": lambda h: Noisy.apply(h) + torch.rand_like(h),
    "several results": several,
    "one behind another": lambda h: Round.apply(Reverse.apply(h, 2.0), 0.01),
    "a size": lambda h: Reverse.apply(h, h.shape[0]),
    "one within another": lambda h: Inner.apply(h),
    "an apply that was kept": lambda h: KEPT(h, 3.0),
}
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "edits what it is given": (lambda h: Doubled.apply(h * 1), "edits memory"),
    "decides by data": (lambda h: Positive.apply(h), "autograd_functions.py"),
    "a class made anew": (lambda h: made().apply(h, 0.5), "made anew"),
    "what is no tree of tensors": (lambda h: Reverse.apply(h, slice(3)), "takes a slice"),
}


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self.before(x).relu()))


def results(run: Callable, model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    seed_started(0)
    out = run(x)
    return out.detach(), *torch.autograd.grad((out * out).sum(), list(model.parameters()))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_runs_as_it_is(call: Callable) -> None:
    model = Calling(call)
    graph = capture(model, (torch.randn(4, 6),))
    assert not graph.leaves and any(isinstance(child, FunctionCall) for child in graph.graph.children())
    optimized = fxopt.optimize(model)
    for rows in (4, 7, 1, 0):
        x = torch.randn(rows, 6)
        for got, want in zip(results(optimized, model, x), results(model, model, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert "apply runs as it is" in str(fxopt.report(optimized))


def test_autocast_is_that_of_the_call() -> None:
    model = Calling(lambda h: Several.apply(h.float(), h.float())[0])
    optimized, x = fxopt.optimize(model), torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = results(optimized, model, x), results(model, model, x)
    torch.testing.assert_close(got, want)


def test_without_gradients_it_is_inlined() -> None:
    with torch.no_grad():
        graph = capture(Calling(CALLS["a straight-through estimator"]), (torch.randn(4, 6),))
    assert not any(isinstance(child, FunctionCall) for child in graph.graph.children())


@pytest.mark.parametrize(("call", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_hold_stays_eager(call: Callable, why: str) -> None:
    def both(run: Callable, x: Tensor) -> Any:
        try:
            return results(run, model, x)
        except TypeError:  # in backward, which gives a gradient for no slice
            return ()

    model = Calling(call)
    optimized = fxopt.optimize(model)
    for x in (torch.randn(4, 6), torch.randn(3, 6)):
        torch.testing.assert_close(both(optimized, x), both(model, x))
    assert why in str(fxopt.report(optimized)).replace("\n", " ")


def test_a_class_that_gives_another_size_later_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Calling(lambda h: Reverse.apply(h, 0.5)[:, :8])
    optimized, x = fxopt.optimize(model), torch.randn(4, 6)
    optimized(x)
    monkeypatch.setattr(Reverse, "forward", staticmethod(lambda ctx, x, alpha: torch.cat([x, x], 1)))
    torch.testing.assert_close(optimized(x), model(x))
