"""fxopt::linear: relu(x W^T + b) through oneDNN from a measured batch size on, through torch's BLAS below it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PROBES = (1, 8, 32, 128, 512)  # 1: MKL's matrix-vector product runs on one thread, oneDNN's on all (1.1 and 0.55 ms)
_NEVER = 1 << 62
_LARGEST_PROBE = 3e8  # multiply-adds: 5-15 ms a run; a library that wins there wins above
_MARGIN = 1.25  # on a busy machine one timing in five is off by more than a tenth; real wins are 1.5-2.4x
_library: torch.library.Library | None = None


def load() -> None:
    """Defines the operator, once. A graph that runs calls :func:`call` instead, past the dispatcher."""
    global _library
    if _library is not None:
        return
    library = torch.library.Library("fxopt", "FRAGMENT")
    library.define("linear(Tensor x, Tensor weight, Tensor? bias, bool relu, int threshold) -> Tensor")
    library.impl("linear", call, "CompositeExplicitAutograd")
    torch.library.register_fake("fxopt::linear", _fake, lib=library)
    torch.library.register_autograd("fxopt::linear", _backward, setup_context=_setup_context, lib=library)
    _library = library


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, threshold: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, ctx.relu, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    grad = grad * (output > 0) if ctx.relu else grad
    rows, needs = grad.flatten(0, -2), ctx.needs_input_grad
    return (
        grad @ weight if needs[0] else None,
        rows.T @ x.flatten(0, -2) if needs[1] else None,
        rows.sum(0) if needs[2] else None,
        None,
        None,
    )


def available() -> bool:
    """Whether this torch can call oneDNN on plain fp32 weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def call(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, threshold: int) -> Tensor:
    """x [..., K], weight [N, K], bias [N]: float32 [..., N]. Training stays with torch: oneDNN has no gradient."""
    rows = x.numel() // x.shape[-1] if x.dim() > 2 else x.shape[0]
    if rows < threshold or (torch.is_grad_enabled() and _needs_grad(x, weight, bias)):
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "relu" if relu else "none", [], "")


def _needs_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


@functools.cache
def threshold(features: int, outputs: int, threads: int) -> int | None:
    """The smallest probed batch size from which oneDNN is faster on this machine; None where it never is.

    On an AVX-512 AMD with torch 2.13 (MKL takes its AVX2 path there): 2.2x at [256, 1024] x [1024, 1024], 2.4x at
    [64, 8152] x [8152, 1024]; slower below 5 us of work, since the call itself costs 12 us more.
    """
    weight, bias = torch.randn(outputs, features), torch.randn(outputs)
    first: int | None = None
    affordable = [rows for rows in PROBES if rows * features * outputs <= _LARGEST_PROBE] or PROBES[:1]
    for rows in reversed(affordable):
        x = torch.randn(rows, features)
        blas, onednn = _seconds([functools.partial(call, x, weight, bias, True, start) for start in (_NEVER, 0)])
        if blas < onednn * _MARGIN:
            break
        first = rows
    return first


def _seconds(contenders: Sequence[Callable[[], Tensor]], rounds: int = 5) -> list[float]:
    """The fastest run of each, interleaved, after a warm-up."""
    best = [float("inf")] * len(contenders)
    with torch.no_grad():
        for round in range(rounds + 1):
            for index, function in enumerate(contenders):
                started = time.perf_counter()
                function()
                if round:
                    best[index] = min(best[index], time.perf_counter() - started)
    return best
