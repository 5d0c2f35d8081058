"""The gradient of a chain: from what its forward kept, layer by layer from the last one.

Products go through oneDNN, which takes transposed views as they are: on an AVX-512 AMD 2.3x torch's BLAS for the
gradient of a [1024, 480] weight at 256 rows (1.1 and 2.4 ms). What comes between two layers is differentiated by torch:
from its result where that is enough, else again from what the layer gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import gradients
from . import gradient, reference
from . import layers as by_torch
from .plan import Op, Step

Kept = Callable[[Sequence[Tensor], Sequence[Tensor | None]], "Sequence[Tensor] | None"]


@dataclass(frozen=True)
class Layer:
    """A linear layer and the steps behind it. own: whether its gradient needs what the layer itself gave."""

    linear: Step
    behind: tuple[Step, ...]
    own: bool

    @property
    def by_result(self) -> bool:
        """Whether its gradient needs what it gives."""
        return bool(self.behind) and not self.own

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.linear, *self.behind)


def layers_of(steps: Sequence[Step]) -> list[Layer]:
    """The steps, which begin with a linear layer, layer by layer."""
    starts = [at for at, step in enumerate(steps) if step.op == Op.LINEAR]
    found = []
    for at, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        behind = tuple(steps[at + 1 : end])
        own = len(behind) > 1 or any(step.op not in gradient.FROM_RESULT for step in behind)
        found.append(Layer(steps[at], behind, own))
    return found


def steps_of(layers: Sequence[Layer]) -> list[Step]:
    return [step for layer in layers for step in layer.steps]


def keeping(layers: Sequence[Layer]) -> list[Step]:
    """The steps of the layers, told which values their gradients need."""
    marked = [(Step(Op.LINEAR, layer.linear.tensors, (float(layer.own),)), *layer.behind) for layer in layers]
    return list(itertools.chain.from_iterable(marked))


class Chain(torch.autograd.Function):
    """fxopt::mlp with its gradient."""

    @staticmethod
    def forward(ctx: Any, layers: Sequence[Layer], kept: Kept, n_inputs: int, *tensors: Tensor | None) -> Tensor:
        inputs: Any = tensors[:n_inputs]
        state = tensors[n_inputs:]
        outputs = kept(inputs, state) or kept_by_torch(inputs, state, layers)
        ctx.layers, ctx.n_inputs, ctx.n_given = layers, n_inputs, len(tensors)
        ctx.set_materialize_grads(False)
        result = outputs[0] if layers[-1].by_result else None  # who edits it must not be told that it is needed
        ctx.save_for_backward(*tensors, result, *outputs[1:])
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, n_given, n_inputs = ctx.saved_tensors, ctx.n_given, ctx.n_inputs
        inputs, state, outputs = saved[:n_inputs], saved[n_inputs:n_given], saved[n_given:]
        needs = ctx.needs_input_grad[3:]
        if grads[0] is None:
            return (None,) * (3 + n_given)
        if gradients.by_definition(grads):
            return (None, None, None, *again(grads[0], inputs, state, steps_of(ctx.layers), needs))
        backward = _Backward(inputs, state, outputs, ctx.layers, needs)
        return (None, None, None, *backward.run(grads[0]))


def laid_out(x: Tensor) -> Tensor:
    """x, or a copy where no strides make its rows a matrix, as torch's linear layers take it: x is the caller's to edit
    before backward, which needs the copy.
    """
    return x if x.dim() <= 2 or x.is_contiguous() else _matrix(x).view(x.shape)


def kept_by_torch(inputs: Sequence[Tensor], state: Sequence[Tensor | None], layers: Sequence[Layer]) -> list[Tensor]:
    """What the kernel gives for a plan that keeps values."""
    x = torch.cat(list(inputs), -1) if len(inputs) > 1 else inputs[0]
    kept = [_matrix(x)]
    for layer in layers:
        x = reference.apply(x, state, layer.linear, by_torch.linear)
        kept += [_matrix(x)] if layer.own else []
        for step in layer.behind:
            x = reference.apply(x, state, step)
        kept.append(_matrix(x))
    return [x, *kept[:-1]]


def again(
    grad: Tensor, inputs: Sequence[Tensor], state: Sequence[Tensor | None], steps: Sequence[Step], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by torch, computed again from the start."""

    def mlp(*tensors: Any) -> list[Tensor]:
        return [reference.mlp(tensors[: len(inputs)], tensors[len(inputs) :], steps)]

    return gradients.again(mlp, (*inputs, *state), [grad], needs)


class _Backward:
    """One walk from the last layer to the first."""

    def __init__(self, inputs: Any, state: Any, outputs: Any, layers: Sequence[Layer], needs: Sequence[bool]) -> None:
        self.inputs, self.state, self.layers = inputs, state, layers
        self.needs_inputs, self.needs = needs[: len(inputs)], needs[len(inputs) :]
        self.grads: list[Tensor | None] = [None] * len(state)
        result, *kept = outputs
        copied = len(kept) == len(layers) + sum(layer.own for layer in layers)
        given = iter(kept)
        self.x: list[Any] = [next(given) if copied else _matrix(inputs[0])]  # what each layer reads
        self.own: list[Tensor | None] = []
        for layer in layers:
            self.own.append(next(given) if layer.own else None)
            self.x.append(next(given, None))
        self.x[-1] = None if result is None else _matrix(result)

    def run(self, grad: Tensor) -> Iterator[Tensor | None]:
        first = 0
        while not self._wanted_in(first):
            first += 1
        grad = _matrix(grad)
        for at in range(len(self.layers) - 1, first - 1, -1):
            layer, x = self.layers[at], self.x[at]
            if layer.own:
                grad = self._through_steps(grad, at)
            weight, bias = (*layer.linear.tensors, None)[:2]
            assert weight is not None
            y = self.x[at + 1] if layer.by_result else None
            grad, turned, sums = gradient.call(grad, y, layer.steps[-1].op)
            if self.needs[weight]:
                self._add(weight, by_torch.product(turned, x))
            if bias is not None and self.needs[bias]:
                self._add(bias, sums)
            if at > first or any(self.needs_inputs):
                grad = by_torch.product(grad, self.state[weight])
        return itertools.chain(self._of_inputs(grad), self.grads)  # type: ignore[return-value]

    def _wanted_in(self, at: int) -> bool:
        """Whether a gradient is asked for in layer `at`, or in front of it."""
        if any(self.needs_inputs):
            return True
        return any(self.needs[index] for step in self.layers[at].steps for index in step.tensors if index is not None)

    def _through_steps(self, grad: Tensor, at: int) -> Tensor:
        layer, own = self.layers[at], self.own[at]
        assert own is not None
        indices = sorted({index for step in layer.behind for index in step.tensors if index is not None})
        wanted = [index for index in indices if self.needs[index]]
        with torch.enable_grad():
            start = own.detach().requires_grad_()
            state = list(self.state)
            for index in wanted:
                state[index] = state[index].detach().requires_grad_()
            y = start
            for step in layer.behind:
                y = reference.apply(y, state, step)
            found = torch.autograd.grad(y, [start, *(state[index] for index in wanted)], grad)
        for index, of_state in zip(wanted, found[1:], strict=True):
            self._add(index, of_state)
        return found[0]

    def _add(self, index: int, gradient: Tensor) -> None:
        """A tensor may be used by several steps."""
        known = self.grads[index]
        self.grads[index] = gradient if known is None else known + gradient

    def _of_inputs(self, grad: Tensor) -> list[Tensor | None]:
        if not any(self.needs_inputs):
            return [None] * len(self.inputs)
        if len(self.inputs) == 1:
            return [grad.view(self.inputs[0].shape)]
        parts = grad.split([x.shape[-1] for x in self.inputs], 1)
        shaped = zip(parts, self.inputs, self.needs_inputs, strict=True)
        return [part.reshape(x.shape) if need else None for part, x, need in shaped]


def _matrix(x: Tensor) -> Tensor:
    """[..., D] as [B, D]; one row has no axis of its own."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
