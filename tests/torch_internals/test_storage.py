"""Which memory a tensor has, and the count of its edits, are still told by what fxopt asks."""

from __future__ import annotations

import numpy as np
import torch

from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.storage import (
    ASKS_FOR_VIEW,
    is_borrowed,
    number_of,
    set_version,
    shares_storage,
    storage_number,
    version_of,
)


def test_views_have_the_storage_of_their_base() -> None:
    x = torch.ones(4)
    with FakeTensorMode():
        fake = torch.ones(4)
    for tensor in (x, fake):
        assert storage_number(tensor) == storage_number(tensor[1:]) == number_of(tensor.untyped_storage()), (
            "a storage's _cdata no longer names it: fxopt/capture/untouched.py and edits.py find written memory by it"
        )
        assert storage_number(tensor) != storage_number(tensor + 1)
        assert shares_storage(tensor, tensor[1:]) and not shares_storage(tensor, tensor + 1), (
            "_is_alias_of no longer tells views: fxopt/shape/aliases.py keeps rewrites from edited memory by it"
        )


def test_views_say_that_they_are() -> None:
    x = torch.ones(4)
    assert ASKS_FOR_VIEW(x[1:]) and not ASKS_FOR_VIEW(x), (
        "Tensor._is_view no longer tells views: fxopt/capture/function_mode.py refuses models that ask it"
    )


def test_a_version_can_be_put_back() -> None:
    x = torch.ones(4)
    before = x._version
    x.add_(1)
    set_version(x, before)
    assert x._version == before, "_unsafe_set_version_counter: what fxopt undoes would count as edits in backward()"


def test_edits_are_counted_but_in_inference_mode() -> None:
    x = torch.ones(4)
    before = version_of(x)
    assert version_of(x.add_(1)) > before, "tensor._version: an edit would go unseen"
    with torch.inference_mode():
        made = torch.ones(4)
    assert version_of(made) == 0


def test_memory_of_an_array_is_borrowed() -> None:
    array = np.ones(3)
    for tensor in (torch.from_numpy(array), torch.as_tensor(array), torch.from_numpy(array)[1:]):
        assert is_borrowed(tensor), "Storage.resizable no longer tells arrays: a graph would write to them unseen"
    for tensor in (torch.tensor(array), torch.ones(3), torch.tensor([1.0])):
        assert not is_borrowed(tensor), "Storage.resizable: literals of a forward would count as arrays"
