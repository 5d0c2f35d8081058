"""The error budget: what a rewritten graph may change in a tensor.

Index programs, lookups and copies are bit-exact. Reordered float arithmetic is judged against an fp64 reference:
its error may be twice eager's, plus what rounding the inputs alone would do (the conditioning of the computation,
measured by perturbing them: one lucky eager value must not forbid every other order of summation).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxopt.tune.tuner import in_pieces

_EPS = 4  # relative difference, in eps of the dtype, that is rounding and nothing else
_TF32 = 2.0**-12  # a product of two numbers of 11 bits each, on average over a sum
_ROWS = 32  # from here on the error of each column of the last dim is judged by itself


@dataclass(frozen=True)
class Reference:
    """fp64 values of one tensor: of the given inputs, and (costs another run) of inputs moved by one rounding each."""

    exact: Tensor
    perturbed: Callable[[], Tensor]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b| where both are finite; 0 for empty tensors."""
    if len(pieces := in_pieces(a, b)) > 1:
        return max(largest_difference(*pair) for pair in pieces)
    difference = (a.double() - b.double()).abs() if not a.is_complex() else (a - b).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def within_budget(eager: Tensor, ours: Tensor, reference: Callable[[], Reference | None]) -> str:
    """ "" when `ours` may stand for `eager`, else what is wrong. Same shape and dtype are the caller's check.

    Args:
        reference: computes the fp64 values; called only when the two differ by more than a few eps.
    """
    pieces = in_pieces(eager, ours)
    if len(pieces) > 1 and not any(within_budget(*pair, lambda: None) for pair in pieces):
        return ""
    if not eager.is_floating_point():
        different = (eager != ours) & ~((eager != eager) & (ours != ours))
        return _worst(eager, ours, different.double()) if different.any() else ""
    finite = eager.isfinite()
    places = (
        (finite != ours.isfinite()) | (eager.isnan() != ours.isnan()) | (~finite & ~eager.isnan() & (eager != ours))
    )
    if places.any():
        return "NaN or infinity where the other has none: " + _worst(eager, ours, places.double())
    a, b = (torch.where(finite, t.double(), 0.0) for t in (eager, ours))
    rounding = _EPS * torch.finfo(eager.dtype).eps * torch.maximum(a.abs(), b.abs())
    excess = (a - b).abs() - rounding
    if not (excess > 0).any():
        return ""
    exact = reference()
    if exact is None:
        return "no fp64 reference for it: " + _worst(eager, ours, excess)
    return _against(eager, ours, exact, finite, rounding)


def within_share(eager: Tensor, ours: Tensor, share: float) -> str:
    """ "" when no element is further from `eager` than `share` of its largest one: the budget of what was asked for
    at a loss."""
    if not eager.is_floating_point() or not eager.numel():
        return "" if torch.equal(eager, ours) else "not equal"
    size = largest_difference(eager, torch.zeros_like(eager))
    excess = (eager.double() - ours.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf) - share * size
    excess = torch.where(eager.isfinite() | (eager.isnan() != ours.isnan()), excess, 0.0)
    if not (excess > 0).any():
        return ""
    return f"{_worst(eager, ours, excess)}; allowed {share:.3g} of {size:.3g}"


def _against(eager: Tensor, ours: Tensor, reference: Reference, finite: Tensor, rounding: Tensor) -> str:
    a, b, ref = (torch.where(finite, t.double(), 0.0) for t in (eager, ours, reference.exact))
    error = (a - ref).abs()
    allowed = 2 * _spread(error) + rounding
    if not ((b - ref).abs() > allowed).any():
        return ""
    moved = torch.where(finite, reference.perturbed().double(), 0.0)
    conditioning = torch.where(error > 0, (moved - ref).abs(), 0.0)  # where eager is exact there is nothing to excuse
    allowed = allowed + 4 * _spread(conditioning)
    excess = (b - ref).abs() - allowed
    if not (excess > 0).any():
        return ""
    at = int(excess.flatten().argmax())
    limit = float(allowed.flatten()[at])
    return f"{_worst(eager, ours, excess)}; fp64 says {float(ref.flatten()[at]):.9g}, budget {limit:.3g}"


def explains(reference: Reference, eager: Tensor, rounding: float) -> bool:
    """Whether eager is near enough to `reference` for it to be the same computation in fp64.

    rounding: relative, of one operation: see :func:`rounding_of`.
    """
    if reference.exact.shape != eager.shape:
        return False
    error, moved = (largest_difference(t, reference.exact) for t in (eager, reference.perturbed()))
    size = largest_difference(reference.exact, torch.zeros_like(reference.exact))
    return error <= 16 * (moved + rounding * size)


def rounding_of(eager: Tensor, graph: fx.Graph) -> float:
    """eps of a tensor's dtype, or of the TF32 that its products may have been made in."""
    eps = torch.finfo(eager.dtype).eps
    if not eager.is_cuda or eager.dtype is not torch.float32:
        return eps
    made_in = [torch.backends.cuda.matmul.fp32_precision]  # allow_tf32 raises where this was set
    if any("conv" in str(node.target) for node in graph.nodes):
        made_in.append(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
    return _TF32 if "tf32" in made_in else eps


def _spread(error: Tensor) -> Tensor:
    """The largest error of each column; of the whole tensor where there are too few rows to tell."""
    if error.dim() >= 2 and error.numel() // error.shape[-1] >= _ROWS:
        return error.flatten(0, -2).amax(0)
    return error.max()


def _worst(eager: Tensor, ours: Tensor, badness: Tensor) -> str:
    at = int(badness.flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), badness.shape)]
    count = int((badness > 0).sum())
    values = [t.flatten()[at].item() for t in (eager, ours)]
    shown = [f"{v:.9g}" if isinstance(v, float) and math.isfinite(v) else str(v) for v in values]
    return f"{count} of {eager.numel()} differ, worst at {index}: eager {shown[0]}, optimized {shown[1]}"
