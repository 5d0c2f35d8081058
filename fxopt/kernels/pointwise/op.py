"""fxopt::pointwise: pointwise operators, broadcasts and small reductions in one pass."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import entry, simd
from ..build import BuildError, Library
from . import reference
from .encode import plan_of, words_of

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_pointwise",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), *simd.HEADERS, *entry.HEADERS),
    cflags=(*simd.CFLAGS, entry.STABLE_ABI),
)
_loading = threading.Lock()
_library: torch.library.Library | None = None
_entry: Callable | None = None


def call(inputs: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Every output of a plan, each contiguous.

    Args:
        inputs: CPU tensors, float32, bool, uint8, int32 or int64, of any strides.
        plan: :func:`.encode.text` of a :class:`.plan.Plan`.

    Raises:
        RuntimeError: inputs that do not fit the plan.
    """
    if _entry is not None:
        outputs = _entry(inputs, words_of(plan))
        if outputs is not None:
            return outputs
    return torch.ops.fxopt.pointwise(inputs, plan)


def load() -> None:
    """Defines the operator, once: with the compiled kernel, or in PyTorch where it cannot be compiled."""
    global _library, _entry
    with _loading:
        if _library is not None:
            return
        library = torch.library.Library("fxopt", "FRAGMENT")
        library.define("pointwise(Tensor[] inputs, str plan) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("pointwise", _below_autograd, "CompositeExplicitAutograd")
        torch.library.register_fake("fxopt::pointwise", _fake, lib=library)
        torch.library.register_autograd("fxopt::pointwise", _backward, setup_context=_setup_context, lib=library)
        try:
            _entry = entry.load(KERNEL, "fxopt_pointwise_run")
        except (BuildError, OSError) as error:
            warnings.warn(f"fxopt: pointwise chains run in PyTorch, without the kernel: {error}", stacklevel=2)
        _library = library


def _below_autograd(inputs: list[Tensor], plan: str) -> list[Tensor]:
    if _entry is not None:
        with torch.no_grad():
            outputs = _entry(inputs, words_of(plan))
        if outputs is not None:
            return outputs
    return [output.clone() if output.requires_grad else output for output in reference.pointwise(inputs, plan_of(plan))]


def _fake(inputs: list[Tensor], plan: str) -> list[Tensor]:
    decoded = plan_of(plan)
    sizes = reference.sizes_of(inputs, decoded)
    return [
        inputs[0].new_empty(
            [1 if axis is None else sizes[axis] for axis in output.dims],
            dtype=torch.bool if output.boolean else torch.float32,
        )
        for output in decoded.outputs
    ]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.plan = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    """The gradients of the reference, computed again."""
    needs = ctx.needs_input_grad[0]
    leaves = [t.detach().requires_grad_(bool(need)) for t, need in zip(ctx.saved_tensors, needs, strict=True)]
    with torch.enable_grad():
        outputs = reference.pointwise(leaves, plan_of(ctx.plan))
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        return [None] * len(leaves), None
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves], None
