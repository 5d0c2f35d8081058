"""Operators with the gradients that they are registered with, past the dispatcher.

torch.library records a call through a tree of its arguments: 50 us of a training step for an operator of three tensors,
100 us for one of 26 tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxopt.torch_internals.operators import below_autograd

_ONE, _NONE = -1, -2  # tensors of an argument that is no list


class Differentiable(Protocol):
    """As torch.library.register_autograd takes it."""

    @property
    def gives_list(self) -> bool: ...

    def set_up(self, ctx: Any, inputs: tuple, output: Any) -> None: ...

    def gradients_of(self, ctx: Any, *grads: Any) -> tuple: ...


def recorded(operator: Differentiable, call: Callable[..., Any], arguments: tuple) -> Any:
    """`call(*arguments)`, of which nothing else is recorded, with the gradients of `operator`."""
    counts = list(map(_count, arguments))
    tensors: list[Tensor | None] = []
    for argument, count in zip(arguments, counts, strict=True):
        if count == _ONE:
            tensors.append(argument)
        elif count >= 0:
            tensors.extend(argument)
    outputs = _Recorded.apply(operator, call, arguments, counts, *tensors)
    return list(outputs) if operator.gives_list else outputs


def _count(argument: Any) -> int:
    if isinstance(argument, list | tuple):
        first = next((each for each in argument if each is not None), None)
        return len(argument) if first is None or isinstance(first, Tensor) else _NONE
    return _ONE if argument is None or isinstance(argument, Tensor) else _NONE


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: Differentiable,
        call: Callable[..., Any],
        arguments: tuple,
        counts: Sequence[int],
        *tensors: Tensor | None,
    ) -> Any:
        with below_autograd():
            outputs = call(*arguments)
        operator.set_up(ctx, arguments, outputs)
        ctx.recorded = operator, counts  # every other name is the operator's
        return outputs if isinstance(outputs, Tensor) else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator, counts = ctx.recorded
        nested = _Nested(ctx, _by_argument(iter(ctx.needs_input_grad[4:]), counts))
        found = operator.gradients_of(nested, *((list(grads),) if operator.gives_list else grads))
        return None, None, None, None, *_flat(found, counts)


class _Nested:
    """A context that tells by argument what needs a gradient. Several threads may go back through one context."""

    def __init__(self, ctx: Any, needs_input_grad: tuple) -> None:
        self._ctx, self.needs_input_grad = ctx, needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _by_argument(flat: Iterator[bool], counts: Sequence[int]) -> tuple:
    return tuple(
        [next(flat) for _ in range(count)] if count >= 0 else next(flat) if count == _ONE else False for count in counts
    )


def _flat(found: Sequence[Any], counts: Sequence[int]) -> Iterator[Tensor | None]:
    for value, count in zip(found, counts, strict=True):
        if count == _ONE:
            yield value
        elif count >= 0:
            yield from [None] * count if value is None else value
