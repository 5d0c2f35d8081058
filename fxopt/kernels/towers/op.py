"""fxopt::towers: parallel linears, mixtures of experts and what follows them, in one call."""

from __future__ import annotations

import functools
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
from .plan import decode, words_of

_HERE = Path(__file__).parent
KERNEL = Library(
    "fxopt_towers",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), *sorted((_HERE.parent / "gemm").glob("*.h")), *simd.HEADERS, *HEADERS),
    cflags=(*simd.CFLAGS, STABLE_ABI),
)
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
    schema = "towers(Tensor[] inputs, Tensor[] weights, Tensor[] biases, str plan) -> Tensor[]"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("towers", _in_pytorch, "CompositeExplicitAutograd")
    library.impl("towers", _on_cpu, "CPU")
    library.impl("towers", _recorded, "Autograd")
    torch.library.register_fake("fxopt::towers", _fake, lib=library)
    return library


def bound(plan: str) -> Callable[..., list[Tensor]]:
    """The operator with its plan, past the dispatcher where nothing is to be recorded."""
    words, entry, operator = _tensor(plan), _entry, torch.ops.fxopt.towers.default

    def towers(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], _: str) -> list[Tensor]:
        outputs = entry(inputs, weights, biases, words) if entry is not None else None
        return operator(inputs, weights, biases, plan) if outputs is None else outputs

    return towers


@functools.lru_cache(1024)
def _tensor(plan: str) -> Tensor:
    return torch.tensor(words_of(plan))


def _on_cpu(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str) -> list[Tensor]:
    outputs = None
    if _entry is not None and inputs[0].dtype == torch.float32:
        with torch.no_grad():
            outputs = _entry(inputs, weights, biases, _tensor(plan))
    return _in_pytorch(inputs, weights, biases, plan) if outputs is None else outputs


def _in_pytorch(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str
) -> list[Tensor]:
    made = reference.towers(inputs, weights, biases, decode(plan))
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [y.clone() if y.untyped_storage()._cdata in given else y.contiguous() for y in made]


def _recorded(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Gradients are those of the plain operators, of any order and for any of the arguments."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *weights, *biases)):
        return _in_pytorch(inputs, weights, biases, plan)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fxopt.towers.default(inputs, weights, biases, plan)


def _fake(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: str) -> list[Tensor]:
    decoded, first = decode(plan), inputs[0]
    leading = first.shape[: -2 if decoded.inner[0] else -1]
    shapes = [(b.inner, b.width // b.inner) if b.inner else (b.width,) for b in decoded.outputs]
    return [first.new_empty((*leading, *shape)) for shape in shapes]
