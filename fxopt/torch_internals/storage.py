"""The memory under tensors: which one it is, whether two share it, and how often it was edited."""

from __future__ import annotations

import torch
from torch._C import _is_alias_of as shares_storage  # type: ignore[attr-defined]
from torch._C._autograd import _unsafe_set_version_counter

ASKS_FOR_VIEW = torch.Tensor._is_view


def storage_number(tensor: torch.Tensor) -> int:
    """One number for all tensors, real or fake, that share a storage; given out again when that dies."""
    return tensor.untyped_storage()._cdata


def number_of(storage: torch.UntypedStorage) -> int:
    """The number that `storage_number` gives for the tensors in it."""
    return storage._cdata


def is_borrowed(tensor: torch.Tensor) -> bool:
    """Whether its memory is another's, as that of torch.from_numpy() is: torch may not make such a storage larger."""
    return not tensor.untyped_storage().resizable()


def version_of(tensor: torch.Tensor) -> int:
    """How often it was edited; 0 for one made in inference mode, whose edits nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Make a tensor's edits, as `tensor._version` counts them, so many."""
    _unsafe_set_version_counter((tensor,), (version,))
