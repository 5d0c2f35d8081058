"""fxopt::mlp: a chain of linear layers and what follows each, in one call.

Rows go through the whole chain in blocks that stay in a core's cache; few rows share out the columns of each layer
instead. The weights are read where they are: nothing is packed, so nothing can be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxopt.facts import Facts

from ..operators import Operator, Operators
from . import autograd, layers, reference
from .library import KERNEL, MLP
from .plan import Op, decode, encode

Call = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[int]], Tensor]


def call_of(plan: Sequence[int], is_wide: bool = True) -> Call:
    """The operator for one plan, past the dispatcher where nothing is to be recorded.

    inputs: [..., K_i] each, float32, any strides. state: weights, biases and statistics as the plan numbers them.
    is_wide: whether a weight may be too large for the caches. Returns [..., N], contiguous. Raises RuntimeError where
    tensors do not fit the plan.
    """
    is_compiled, past_dispatcher = OPERATORS.compiled(), OPERATORS.past_dispatcher("mlp")
    words, steps = torch.tensor(plan, dtype=torch.int64, device="cpu"), decode(plan)
    n_inputs = plan[0]
    chain = autograd.layers_of(steps) if steps[0].op == Op.LINEAR else []
    marked = torch.tensor(encode(-n_inputs, autograd.keeping(chain)), device="cpu")

    def kept(inputs: Sequence[Tensor], state: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
        return None if layers.pays(inputs, state, steps) else past_dispatcher(inputs, state, marked)

    def mlp(inputs: Sequence[Tensor], state: Sequence[Tensor | None], plan: Sequence[int]) -> Tensor:
        if not torch.is_grad_enabled() and (not is_compiled or (is_wide and layers.pays(inputs, state, steps))):
            return reference.mlp(inputs, state, steps, layers.linear).contiguous()
        outputs = past_dispatcher(inputs, state, words)
        if outputs is not None:
            return outputs[0]
        if chain and torch.is_grad_enabled():
            return autograd.Chain.apply(chain, kept, n_inputs, *map(autograd.laid_out, inputs), *state)
        return torch.ops.fxopt.mlp.default(inputs, state, plan)

    return mlp


def _in_pytorch(inputs: Sequence[Tensor], state: Sequence[Tensor | None], plan: Sequence[int]) -> Tensor:
    return reference.mlp(inputs, state, decode(plan)).contiguous()


def _fake(inputs: Sequence[Tensor], state: Sequence[Tensor | None], plan: Sequence[int]) -> Tensor:
    (last,) = [step.tensors[0] for step in decode(plan) if step.op == Op.LINEAR][-1:]
    assert last is not None
    weight = state[last]
    assert weight is not None
    return inputs[0].new_empty((*inputs[0].shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, state, ctx.plan = inputs
    ctx.n_inputs, ctx.absent = len(x), [tensor is None for tensor in state]
    ctx.save_for_backward(*x, *(tensor for tensor in state if tensor is not None))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) for _ in range(ctx.n_inputs)]
    state = [None if absent else next(saved) for absent in ctx.absent]
    needs = [tensor is not None and tensor.is_floating_point() for tensor in (*inputs, *state)]
    grads = autograd.again(grad, inputs, state, decode(ctx.plan), needs)
    return grads[: len(inputs)], grads[len(inputs) :], None


def _needs_result(plan: Sequence[int]) -> bool:
    steps = decode(plan)
    return steps[0].op == Op.LINEAR and autograd.layers_of(steps)[-1].by_result


_FACTS = Facts(rows="layers", overwritable=True, needs_result=_needs_result)
OPERATORS = Operators((Operator(MLP, _in_pytorch, _fake, _backward, _setup_context, facts=_FACTS),), KERNEL)
