"""Gradients through a definition in PyTorch, computed again: of any order, and of many at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxopt.autocast import Autocast
from fxopt.torch_internals.modes import is_legacy_batchedtensor


def mark(
    ctx: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], differentiable: Sequence[Collection[int]]
) -> None:
    """Only an output that is differentiable in an input that asks for a gradient requires one, as each by itself would;
    and a backward is told, by None, which outputs have no gradient.

    differentiable: for each output the numbers of inputs.
    """
    asking = {number for number, tensor in enumerate(inputs) if tensor.requires_grad}
    constant = [y for y, reads in zip(outputs, differentiable, strict=True) if asking.isdisjoint(reads)]
    ctx.mark_non_differentiable(*constant)
    ctx.set_materialize_grads(False)


def where_they_flow(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A backward that gives no gradient where it is given none: what only a comparison reads has None in eager, and an
    optimizer with momentum tells that from zeros. Its context must have `set_materialize_grads(False)`. Autocast around
    the caller's backward changes nothing: what is computed again has the dtypes that the forward gave."""

    @functools.wraps(backward)
    def flowing(ctx: Any, *grads: Any) -> tuple:
        if any(grad is not None for grad in tree_leaves(grads)):
            with Autocast(None):
                return backward(ctx, *grads)
        return tuple([None] * len(need) if isinstance(need, list) else None for need in ctx.needs_input_grad)

    return flowing


def save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    """A setup_context for a backward that reads its arguments, tensors all of them, and nothing else."""
    ctx.save_for_backward(*inputs)


def by_definition(grads: Sequence[Tensor | None]) -> bool:
    """Whether a backward must keep to PyTorch's own operators: it may be differentiated itself (create_graph), or it
    gets many gradients at once (is_grads_batched)."""
    return torch.is_grad_enabled() or any(grad is not None and is_legacy_batchedtensor(grad) for grad in grads)


def again(
    function: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """The gradients of ``function(*tensors)``, one a tensor; None where none is needed, or none flows.
    Without `needs` those are needed of which a tensor asks for one.

    Where gradients are on they are differentiable, also in tensors that need none now: a penalty on the gradient of the
    input is one on the weights.
    """
    create = torch.is_grad_enabled()
    needs = [tensor is not None and tensor.requires_grad for tensor in tensors] if needs is None else needs
    with torch.enable_grad():
        given = [_given(tensor, need, create) for tensor, need in zip(tensors, needs, strict=True)]
        outputs = function(*given)
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None and y.requires_grad]
    wanted = [x for x, need in zip(given, needs, strict=True) if need and x is not None and x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(tensors)
    found = torch.autograd.grad(
        [y for y, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True, create_graph=create
    )
    by_id = dict(zip(map(id, wanted), found, strict=True))
    return [by_id.get(id(tensor)) for tensor in given]


def _given(tensor: Tensor | None, need: bool, create: bool) -> Tensor | None:
    """A tensor of this call alone, so that no gradient goes further than to it."""
    if tensor is None or (create and not need):
        return tensor
    return tensor.view_as(tensor) if create else tensor.detach().requires_grad_(need)
