"""What rounding does to a program: every result of a run is moved by as much as the program's dtype rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Rounding(TorchFunctionMode):
    """Moves every result of `dtype` that is memory of its own by up to one rounding."""

    def __init__(self, seed: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.eps = eps

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _NORMS and self.dtype is torch.float64:
            with self:
                normalized = _NORMS[function](*args, **(kwargs or {}))
            if normalized is not None:
                return normalized
        name = getattr(function, "__name__", "")
        if not isinstance(result, Tensor) or result.dtype is not self.dtype or name.endswith("_"):
            return result
        if result._is_view() or any(isinstance(a, Tensor) and overlap(result, a) for a in args) or name == "__get__":
            return result
        noise = torch.rand(result.shape, generator=self.generator, dtype=self.dtype, device="cpu")
        moved = self.eps * (2 * noise.to(result.device) - 1)
        if function is F.linear:  # whose terms may be much larger than their sum
            result = result + moved * F.linear(*(t if t is None else t.detach().abs() for t in args))
        return result * (1 + moved)


class Digits(TorchDispatchMode):
    """Whether no result of a run in float64 has more digits than `dtype` has, or than float32 has for float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = torch.float32 if dtype is torch.float64 else dtype
        self.suffice = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if "empty" not in function.__name__:
            self.suffice = self.suffice and all(self._holds(t) for t in tree_leaves(results) if isinstance(t, Tensor))
        return results

    def _holds(self, result: Tensor) -> bool:
        return not bool(((result.to(self.dtype).to(result.dtype) != result) & ~result.isnan()).any())


class Widening(TorchFunctionMode):
    """A program in float64 whose casts to float32 are casts to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **(kwargs or {}))


def overlap(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.numel() or not b.numel():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return _normalized(x, list(range(-len(shape), 0)), weight, bias, eps)


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not training:
        return None
    weight, bias = (None if t is None else t.view(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    return _normalized(x, [d for d in range(x.dim()) if d != 1], weight, bias, eps)


def _normalized(x: Tensor, axes: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By operators that each round: of two or three values nearly all of a norm's gradient cancels."""
    centered = x - x.mean(axes, keepdim=True)
    y = centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


_NORMS: dict[Any, Callable[..., Tensor | None]] = {F.layer_norm: _layer_norm, F.batch_norm: _batch_norm}
