"""fxopt::towers: parallel linears, mixtures of experts and what follows them, in one call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import simd
from ..build import BuildError, Library
from ..entry import HEADERS, STABLE_ABI
from ..entry import load as load_kernel
from . import reference
from .plan import Plan, decode, encode

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_towers",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), *sorted((_HERE.parent / "gemm").glob("*.h")), *simd.HEADERS, *HEADERS),
    cflags=(*simd.CFLAGS, STABLE_ABI),
)
_SCHEMA = "towers(Tensor[] inputs, Tensor[] weights, Tensor?[] biases, int[] plan) -> Tensor[]"
_loading = threading.Lock()
_library: torch.library.Library | None = None
_entry: Callable | None = None


def load() -> None:
    """Defines the operator, once: with the compiled kernel, or in plain PyTorch where it cannot be compiled."""
    global _library, _entry
    with _loading:
        if _library is None:
            _library = _define()
            try:
                _entry = load_kernel(KERNEL, "fxopt_towers_run")
            except (BuildError, OSError) as error:
                warnings.warn(f"fxopt: towers run in PyTorch, without the compiled kernel: {error}", stacklevel=3)


def _define() -> torch.library.Library:
    library = torch.library.Library("fxopt", "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("towers", _in_pytorch, "CompositeExplicitAutograd")
    library.impl("towers", _recorded, "Autograd")
    torch.library.register_fake("fxopt::towers", _fake, lib=library)
    return library


def bound(plan: Plan) -> Callable[..., list[Tensor]]:
    """The operator with its plan, past the dispatcher where nothing is to be recorded."""
    words = encode(plan)
    tensor, entry, operator = torch.tensor(words), _entry, torch.ops.fxopt.towers.default

    def towers(
        inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], _: Sequence[int]
    ) -> list[Tensor]:
        outputs = entry(inputs, weights, biases, tensor) if entry is not None else None
        return operator(inputs, weights, biases, words) if outputs is None else outputs

    return towers


def _in_pytorch(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], plan: Sequence[int]
) -> list[Tensor]:
    made = reference.towers(inputs, weights, biases, decode(plan))
    return [y.contiguous() if _is_own(y, (*inputs, *weights)) else y.clone() for y in made]


def _is_own(y: Tensor, given: Sequence[Tensor]) -> bool:
    return all(y.untyped_storage()._cdata != x.untyped_storage()._cdata for x in given)


def _recorded(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], plan: Sequence[int]
) -> list[Tensor]:
    """Gradients are those of the plain operators, of any order and for any of the arguments."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *weights, *biases)):
        return _in_pytorch(inputs, weights, biases, plan)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fxopt.towers.default(inputs, weights, biases, plan)


def _fake(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], plan: Sequence[int]
) -> list[Tensor]:
    decoded, first = decode(plan), inputs[0]
    leading = first.shape[: -2 if decoded.inner[0] else -1]
    shapes = [(b.inner, b.width // b.inner) if b.inner else (b.width,) for b in decoded.outputs]
    return [first.new_empty((*leading, *shape)) for shape in shapes]
