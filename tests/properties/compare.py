"""Eager against optimized: the same values or the same exception, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_SEEDS = 4  # the largest gradient of an output


@dataclass
class Outcome:
    """What a call gave: outputs and gradients by name, or an exception."""

    outputs: Any = None
    gradients: dict[str, Tensor | None] | None = None
    error: Exception | None = None


def outcome(model: nn.Module, arguments: tuple[Tensor, ...], grad: bool) -> Outcome:
    """One call, and with `grad` the gradients of all parameters and inputs of a fixed random loss."""
    model.zero_grad(set_to_none=True)
    arguments = tuple(a.detach().requires_grad_(a.requires_grad) for a in arguments)
    try:
        with torch.set_grad_enabled(grad):
            outputs = model(*arguments)
            return Outcome(outputs, _gradients(model, arguments, outputs) if grad else None)
    except Exception as error:
        return Outcome(error=error)


def _gradients(model: nn.Module, arguments: tuple[Tensor, ...], outputs: Any) -> dict[str, Tensor | None]:
    generator = torch.Generator("cpu").manual_seed(7)
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if leaf.requires_grad]
    seeds = [
        torch.randint(-_SEEDS, _SEEDS + 1, leaf.shape, generator=generator, device="cpu").to(leaf) for leaf in leaves
    ]
    if leaves:
        torch.autograd.backward(leaves, seeds)
    named = [*model.named_parameters(), *((f"input {i}", a) for i, a in enumerate(arguments) if a.requires_grad)]
    return {name: tensor.grad for name, tensor in named}


def assert_same(eager: Outcome, ours: Outcome, eps: float = 0.0) -> None:
    """eps: of the narrowest floats that are computed in, where outputs are wider."""
    if "cannot reshape tensor of 0 elements" in str(eager.error):
        return  # .view(0, -1), where a graph may know the size
    if eager.error is not None:
        assert ours.error is not None, f"eager raises {eager.error!r}, the optimized model nothing"
        assert isinstance(ours.error, type(eager.error)), (
            f"eager raises {eager.error!r}, the optimized model {ours.error!r}"
        )
        return
    if ours.error is not None:
        raise AssertionError("only the optimized model raises") from ours.error
    left, spec = pytree.tree_flatten(eager.outputs)
    right, other = pytree.tree_flatten(ours.outputs)
    assert spec == other, f"expected {spec}, found {other}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.requires_grad == b.requires_grad, f"output {index}: requires_grad {a.requires_grad}, {b.requires_grad}"
        _close(f"output {index}", a.detach(), b.detach(), eps)
    _same_sharing(left, right)
    for name, gradient in (eager.gradients or {}).items():
        found = (ours.gradients or {})[name]
        assert (gradient is None) == (found is None), f"gradient of {name}: {gradient}, {found}"
        if gradient is not None and found is not None:
            neither = ~(gradient.isfinite() | found.isfinite())  # (1 - 1) * inf is NaN here and inf - inf there
            _close(f"gradient of {name}", gradient.masked_fill(neither, 0), found.masked_fill(neither, 0), eps, _SEEDS)


def _close(what: str, expected: Tensor, found: Tensor, eps: float, terms: float = 0.0) -> None:
    """Equal up to the rounding of a division: sums of the values in use are exact in any order.

    terms: what is summed is as large, however small the sum.
    """
    assert (found.shape, found.dtype, found.layout) == (expected.shape, expected.dtype, expected.layout), what
    if expected.dtype.is_floating_point:
        tolerance = 8 * max(eps, torch.finfo(expected.dtype).eps)
        scale = max(terms, expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0)
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    else:
        assert torch.equal(found, expected), what


def _same_sharing(eager: list[Tensor], ours: list[Tensor]) -> None:
    """Outputs share memory only where eager's do: the caller may edit one of them."""
    for i in range(len(ours)):
        for j in range(i):
            shared = _overlap(ours[i], ours[j])
            assert not shared or _overlap(eager[i], eager[j]), f"outputs {j} and {i} share memory"


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
