"""What is derived from a weight, kept until the weight changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxopt.torch_internals.optimizer_steps import after_fused_steps

Derived = TypeVar("Derived")
_SAMPLES = 64
_NONE = torch.empty(0, device="cpu")


class Kept(Generic[Derived]):
    """`derive(weight, *options)` for weights that seldom change.

    load_state_dict and every other recorded edit count the tensor's version up. Optimizers with fused=True do not, so
    the end of their step is heard of. Nor do edits through `.data` and NumPy: 64 elements, evenly spread, are compared
    at each call (4 us), which sees any that touches most of the weight. Not on a GPU, which that would wait for.
    """

    def __init__(self, derive: Callable[..., Derived]) -> None:
        self._derive = derive
        self._known: Any = WeakTensorKeyDictionary()
        after_fused_steps(self._forget)

    def of(self, weight: Tensor, *options: Any) -> Derived:
        samples = _samples(weight)
        found = self._known.get(weight)
        if found is not None:
            mark, then, derived = found
            if mark == (weight._version, weight.data_ptr(), options) and torch.equal(then, samples):
                return derived  # type: ignore[no-any-return]
        derived = self._derive(weight, *options)
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()  # calls on other streams read it too
        self._known[weight] = (weight._version, weight.data_ptr(), options), samples.clone(), derived
        return derived

    def _forget(self, weight: Tensor) -> None:
        if self._known:
            self._known.pop(weight, None)


def _samples(weight: Tensor) -> Tensor:
    if weight.is_cuda:
        return _NONE
    flat = weight.detach().view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]
