"""What is timed: a forward or a training step, of eager, of the optimized model and of what a user compares with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxopt.report.data import Contender
from fxopt.runtime.typed import bare_twin

Call = Callable[[], Any]
Step = Callable[[Callable[..., Any], tuple], Call]
OTHERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {"torch.compile": torch.compile}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Other:
    """A contender that a user named; `call` is None where it failed."""

    name: str
    call: Call | None
    problem: str = ""

    def measured(self, eager: float, timed: Iterator[float], distrust: str) -> Contender:
        """`timed`: the seconds of those contenders that have a call, in order."""
        if self.call is None:
            return Contender(self.name, problem=self.problem)
        seconds = next(timed)
        return Contender(self.name, seconds, None if distrust else eager / seconds)


def forward(model: Callable[..., Any], args: tuple) -> Call:
    return lambda: model(*args)


def step(model: Callable[..., Any], args: tuple) -> Call:
    """A forward, and the gradients of the sum of its results; they go nowhere, so that nothing accumulates or steps."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    leaves = [leaf for leaf in (*parameters, *tree_leaves(args)) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def run() -> Any:
        results = [leaf for leaf in tree_leaves(model(*args)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        ones = [torch.ones_like(result) for result in results]
        return torch.autograd.grad(results, leaves, ones, allow_unused=True) if results and leaves else results

    return run


def contenders(names: Sequence[str], original: nn.Module, args: tuple, run: Step) -> list[Other]:
    """The contenders of these names, ready to be timed; their answers are compared with eager first."""
    return [_contender(name, original, args, run) for name in names]


def _contender(name: str, original: nn.Module, args: tuple, run: Step) -> Other:
    try:
        model = OTHERS[name](bare_twin(original))  # compilers mark the module that they are given
        problem = _difference(original(*args), model(*args))
        call = run(model, args)
        call()
    except Exception as error:  # whatever another compiler raises, the report has a line for it
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return Other(name, None if problem else call, problem)


def _difference(expected: Any, found: Any) -> str:
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        if isinstance(one, Tensor) and not torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"its answer differs from eager's by up to {(one - other).abs().max().item():.2g}"
    return ""
